"Cut books8-small and books-word-small as nbs/experiments/corpora.ipynb does, and compare with its recorded hashes."
import json, sys, hashlib, lzma, re
from collections import Counter
from pathlib import Path
repo, data, out = map(Path, sys.argv[1:])
cells = [''.join(c['source']) for c in json.loads((repo/'nbs/experiments/corpora.ipynb').read_text())['cells']]
from fastcore.test import test_eq
for c in cells:
    if c.startswith('def pieces'): exec(c)
    if c.startswith('def cut'): exec(c.split('small = recorded')[0])
was = json.loads((repo/'nbs/results/small-corpora.json').read_text())['files']
now = cut(data, out)['files']
for name, x in now.items(): print(name, x, 'as recorded' if x == was[name] else f'DIFFERS from {was[name]}')
assert now == was
