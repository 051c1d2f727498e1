"The notebooks as documents: what a reader must not find in them."
import ast, builtins, json, re
from importlib.util import resolve_name
from pathlib import Path
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT/'nbs').rglob('[!_]*.ipynb')) # _: not run yet

def cells(path): return json.loads(path.read_text(encoding='utf-8'))['cells']
def outputs(path): return json.dumps([o for c in cells(path) for o in c.get('outputs', [])])

@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
class TestNotebook:
    def test_opens_with_a_title_a_subtitle_and_its_time(self, path):
        title, text = ([''.join(c['source']) for c in cells(path) if c['cell_type'] == 'markdown'] + [''])[:2]
        assert re.match(r'# \S.*\n> \S', title)
        if path.stem != 'index': assert re.search(r'\A\*(?:Runs|This page runs) in .*(seconds|minute)', title.split('\n\n', 1)[-1] if '\n\n' in title else text)
    def test_outputs_are_committed_and_clean(self, path):
        out = outputs(path)
        assert any(c.get('outputs') for c in cells(path))
        assert '"output_type": "error"' not in out and '"name": "stderr"' not in out
        assert 'widgets' not in json.loads(path.read_text(encoding='utf-8'))['metadata'] # of bars
        assert not re.search(r'(?<![\w:/.<])/(?:home|root|tmp|work|Users)/', out)
    def test_is_small(self, path): assert path.stat().st_size < 200_000

def module(path): return ''.join(cells(path)[0]['source']).split()[-1] # of nbs/engine/00_fused.ipynb: engine.fused

def test_imports_point_backwards():
    names = [module(p) for floor in ('method', 'engine', 'beyond') for p in sorted((ROOT/'nbs'/floor).glob('*.ipynb'))]
    # settings and progress, which all floors use, come first; what uses all floors comes last
    order, seen = sorted(names, key=lambda name: (name not in ('config', 'progress'), name in ('engine.run', 'engine.cli'))), set()
    for i, name in enumerate(order):
        code = ast.parse((ROOT/'allatt_prune'/f"{name.replace('.', '/')}.py").read_text(encoding='utf-8'))
        for node in (n for n in code.body if isinstance(n, ast.ImportFrom) and n.level):
            home = resolve_name('.'*node.level + (node.module or ''), f'allatt_prune.{name}'.rpartition('.')[0])
            used = {x.removeprefix('allatt_prune.') for x in (home, *(f'{home}.{x.name}' for x in node.names))}
            assert not used & {*order[i:]}, f'{name} imports {used}'
            seen |= used
    assert seen >= {'data', 'engine.fused', 'timing'}

def test_the_method_needs_no_engine(): # not even in its examples
    for path in (ROOT/'nbs'/'method').glob('*.ipynb'):
        code = '\n'.join(''.join(c['source']) for c in cells(path) if c['cell_type'] == 'code')
        assert not re.search(r'import.*engine|from \S*engine', code), path.name

def test_notebook_links_exist():
    for path in NOTEBOOKS:
        text = '\n'.join(''.join(c['source']) for c in cells(path) if c['cell_type'] == 'markdown')
        for link in re.findall(r'\]\(([^)#:]+\.(?:ipynb|png|svg|json|md))', text): assert (path.parent/link).exists(), f'{path.name}: {link}'

def test_the_first_page_shows_the_recorded_run():
    from allatt_prune.engine.report import summary
    recorded = json.loads((ROOT/'nbs'/'results'/'tiny.json').read_text(encoding='utf-8'))
    readme = (ROOT/'README.md').read_text(encoding='utf-8')
    assert summary(recorded['rows']) in readme
    kept = sum(map(sum, recorded['keep']))
    assert [r['heads'] for r in recorded['rows'] if r['model'] == 'pruned'] == [kept]
    runs = json.loads((ROOT/'nbs'/'results'/'tiny-seeds.json').read_text(encoding='utf-8'))['rows']
    gone = [32 - sum(map(sum, r['keep'])) for r in runs]
    cost = [r['pruned']['test'] - r['control']['test'] for r in runs]
    assert (f'{len(runs)} runs (five seeds, each at three commits that round differently, one thread) removed {min(gone)} to {max(gone)} heads, '
            f'which cost {min(cost):.2f} to {max(cost):.2f} bits') in readme

def test_each_block_of_the_readme_needs_no_other():
    blocks = re.findall(r'```python\n(.*?)```', (ROOT/'README.md').read_text(encoding='utf-8'), re.S)
    for block in blocks:
        nodes = [*ast.walk(ast.parse(block))]
        made = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        made |= {(a.asname or a.name).split('.')[0] for n in nodes if isinstance(n, ast.Import|ast.ImportFrom) for a in n.names}
        made |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
        used = {n.id for n in nodes if isinstance(n, ast.Name)}
        assert not used - made - {*dir(builtins)}, block
    assert len(blocks) >= 2
