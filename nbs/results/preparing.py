"""Peak memory of preparing and opening texts of the paper's sizes: python nbs/results/preparing.py, some minutes.

The texts are synthetic: one has the size, format and word frequencies (Zipf's law) of WikiText-103, the other is 100 MB of random
letters, for text8. Each row is the peak of a separate process."""
import json, os, subprocess, sys, tempfile
from pathlib import Path
import numpy as np
from allatt_prune.engine.report import environment
sys.path.append(str(Path(__file__).resolve().parents[1]/'experiments'))
from experiment import provenance

def zipf_text(path, tokens, words=267_733, seed=0): # WikiText's format, 57 words per line on average
    rng, letters = np.random.default_rng(seed), 'abcdefghijklmnopqrstuvwxyz'
    def name(r): return (name(r//26 - 1) if r >= 26 else '') + letters[r % 26]
    suffixes = [''.join(rng.choice(list(letters), n)) for n in rng.choice(3, words, p=[.31, .31, .38])]
    names = np.array([f'{name(r)}_{s} ' if s else f'{name(r)} ' for r, s in enumerate(suffixes)], dtype=object)
    share = (1 / (np.arange(words) + 2.7)).cumsum()
    with open(path, 'w') as f:
        for n in range(0, tokens, 2**20):
            some = names[np.searchsorted(share, rng.random(min(2**20, tokens - n)) * share[-1])]
            some[rng.random(len(some)) < 1/57] = '\n '
            f.write(''.join(some))
        f.write('\n')

MEASURED = """import json, re, sys
from allatt_prune.engine.corpora import load_corpus
c = load_corpus(sys.argv[1], sys.argv[2], unit=sys.argv[3])
peak = int(re.search('VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) / 1e3 # peak since the process started
print(json.dumps(dict(tokens=len(c.train) + len(c.valid) + len(c.test), symbols=len(c.vocab), peak_MB=peak)))"""

def measure(folder):
    zipf_text(f'{folder}/words', 103_000_000)
    rng, alphabet = np.random.default_rng(0), np.frombuffer(b' abcdefghijklmnopqrstuvwxyz', np.uint8)
    alphabet[rng.integers(0, 27, 10**8, dtype=np.uint8)].tofile(f'{folder}/chars')
    for unit in ('word', 'char'):
        for what in ('prepare', 'open'):
            done = subprocess.run([sys.executable, '-c', MEASURED, f'{folder}/{unit}s', f'{folder}/cache', unit],
                                  capture_output=True, text=True, check=True)
            row = dict(unit=unit, what=what, MB=os.path.getsize(f'{folder}/{unit}s') / 1e6)
            yield row | json.loads(done.stdout)

if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as folder: rows = [*measure(folder)]
    found = dict(environment=environment('cpu') | dict(numpy=np.__version__), provenance=provenance(__file__), rows=rows)
    Path(__file__).with_suffix('.json').write_text(json.dumps(found, indent=1) + '\n')
