__version__ = "0.1.0"

import importlib as _importlib, sys as _sys, types as _types

_HOMES = dict(LM='model', LMConfig='config', HeadGates='gates', load_corpus='corpora', get_recipe='recipe',
              train='train', evaluate='train', remove_heads='remove') # loaded when asked for: PyTorch takes seconds
__all__ = [*_HOMES]

def __getattr__(name):
    if name not in _HOMES: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(_importlib.import_module(f'{__name__}.{_HOMES[name]}'), name)

def __dir__(): return ['__version__', *__all__]

class _Package(_types.ModuleType):
    "`train` is the function, also when the import system has loaded the module `allatt_prune.train`."
    def __setattr__(self, name, value):
        if name not in _HOMES or not isinstance(value, _types.ModuleType): super().__setattr__(name, value)

_sys.modules[__name__].__class__ = _Package
