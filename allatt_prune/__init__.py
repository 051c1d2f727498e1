__version__ = "0.1.0"

import importlib as _importlib, sys as _sys, types as _types

_HOMES = dict(LM='model', LMConfig='config', HeadGates='gates', load_corpus='engine.corpora', remove_heads='remove',
              get_recipe='config', train='train', evaluate='train', text_for='engine.run') # loaded when asked for, as PyTorch is slow
_METHODS = dict(model=['engine.checkpoint', 'engine.generate']) # modules that give their classes methods
__all__ = [*_HOMES]

def _load(module): return _importlib.import_module(f'{__name__}.{module}')

def __getattr__(name):
    if name not in _HOMES: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(_load(_HOMES[name]), name)

def __dir__(): return ['__version__', *__all__]

class _Package(_types.ModuleType):
    def __setattr__(self, name, value): # as the import system does once a module is loaded
        if name in _HOMES and isinstance(value, _types.ModuleType): return # `train` stays the function
        super().__setattr__(name, value)
        for module in _METHODS.get(name, ()): _load(module)

_sys.modules[__name__].__class__ = _Package
