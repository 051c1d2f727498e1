__version__ = "0.1.0"

from . import checkpoint # gives LM its save_pretrained and from_pretrained, whatever is imported first
