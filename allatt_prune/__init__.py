__version__ = "0.1.0"

import importlib as _importlib, sys as _sys, types as _types

_HOMES = dict(LM='model', LMConfig='config', HeadGates='gates', load_corpus='corpora', remove_heads='remove',
              get_recipe='recipe', train='train', evaluate='train') # loaded when asked for, as PyTorch is slow
__all__ = [*_HOMES]

def __getattr__(name):
    if name not in _HOMES: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(_importlib.import_module(f'{__name__}.{_HOMES[name]}'), name)

def __dir__(): return ['__version__', *__all__]

class _Package(_types.ModuleType):
    "`train` is the function, also when the import system has loaded the module of that name."
    def __setattr__(self, name, value):
        submodule = isinstance(value, _types.ModuleType)
        if not (submodule and name in _HOMES): super().__setattr__(name, value)

_sys.modules[__name__].__class__ = _Package
