__version__ = "0.1.0"

import os, signal, sys
if os.path.basename(sys.argv[0]) == 'allatt-prune' or sys.argv[0] == '-m' and 'allatt_prune' in sys.orig_argv:
    # the command: it loads what it needs; Ctrl-C while libraries are still loading ends it with one line
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b'allatt-prune: stopped by SIGINT\n'), os._exit(130)))
else:
    from .corpora import load_corpus
    from . import checkpoint, generate # give LM its methods, whatever is imported first
