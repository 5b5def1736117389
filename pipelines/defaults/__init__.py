"""A study of settings: which optimizer, clip norm, batch and selection learn best on seven tasks at
three budgets.

`tasks` has the data and the models, `settings` what is searched, `run` trains one setting, `search`
halves the field, `page` writes what was found, `study` does all of it.
"""
