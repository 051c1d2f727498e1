__version__ = "0.1.0"

_HOMES = dict(LM='model', LMConfig='config', HeadGates='gates', load_corpus='engine.corpora', remove_heads='remove',
              get_recipe='config', train='training', evaluate='training', text_for='engine.run', run='engine.run')
__all__ = [*_HOMES]

def __getattr__(name): # loaded when asked for, as PyTorch is slow
    from importlib import import_module
    if name == 'LM': [import_module(f'{__name__}.engine.{more}') for more in ('checkpoint', 'generate')] # its methods
    if name in _HOMES: return getattr(import_module(f'{__name__}.{_HOMES[name]}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

def __dir__(): return ['__version__', *__all__]
