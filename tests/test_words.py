"The English of notebooks, docstrings, comments and the README: patterns that must not come back, and spelling."
import io, json, re, subprocess, sys, tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = r"""whoever | shall | anew | likewise | once\ more | two\ fifths | three\ eighths | the\ former | the\ latter | bits\ of\ test\ text
    | a\ training(?!\ (?:run|step|batch|text|phase|loop|set|segment)) | gone\ from\ (?:its|the)\ first\ step | models?\ of\ Hugging\ Face"""

def words(code): # docstrings and comments
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return '\n'.join(t.string for t in tokens if t.type == tokenize.COMMENT or t.type == tokenize.STRING and ' ' in t.string)

def texts(): # name, English text
    for path in sorted((ROOT/'nbs').rglob('*.ipynb')):
        if '.ipynb_checkpoints' in path.parts: continue
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        yield path.stem, '\n\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
    for path in sorted((ROOT/'allatt_prune').rglob('*.py')): yield path.stem, words(path.read_text(encoding='utf-8'))
    for name in ('README.md', 'nbs/CHANGELOG.md'): yield name, (ROOT/name).read_text(encoding='utf-8')

def test_patterns_that_read_badly():
    found = [(name, m[0]) for name, text in texts() for m in re.finditer(rf'\b(?:{PATTERNS})\b', text, re.I | re.X)]
    found += [(path.stem, m[0]) for path in (ROOT/'allatt_prune').rglob('*.py') # a docstring is a phrase, not a clause
              for m in re.finditer(r'^ +"+(?:What|Which|How)\b.*', path.read_text(encoding='utf-8'), re.M)]
    assert not found

def test_spelling():
    text = '\n'.join(text for _, text in texts())
    end = subprocess.run([sys.executable, '-m', 'codespell_lib', '-'], input=re.sub(r'`[^`]*`|\$[^$]*\$', '', text),
                         capture_output=True, text=True)
    assert end.returncode == 0, end.stdout
