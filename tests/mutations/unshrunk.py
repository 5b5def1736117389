"""A plugin of pytest: the first example that fails is enough, hypothesis seeks no smaller one."""

from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")
