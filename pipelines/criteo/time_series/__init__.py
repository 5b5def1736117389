"""Trains the click model on days as they come, each period of days under a plan of its own.

Ghazi et al., NeurIPS 2023, sections 4.3 and D.2.2: the first days train, the last ones evaluate,
and the model is updated once a streaming period. `days.py` finds the days and cuts them into
periods; `reading.py` makes a period's examples ready; `periods.py` has its plan, its rows and its
optimizer; `train.py` goes through the periods, also after it was killed; `study.py` and `page.py`
run the paper's table and figures.
"""
