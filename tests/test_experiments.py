"The experiments print what their result files say."
import contextlib, importlib.util, json, re
from pathlib import Path
import numpy as np, pytest
from execnb.nbio import read_nb
from execnb.shell import CaptureShell
from allatt_prune import LM
from allatt_prune.config import SETTINGS, get_recipe
from allatt_prune.engine.checkpoint import shipped

FOLDER = Path(__file__).parent.parent/'nbs'/'experiments'
NOTEBOOKS = sorted(p for p in FOLDER.glob('[!_]*.ipynb') if p.stem != 'experiment') # _: not run yet
RESULTS = {p.stem: json.loads(p.read_text(encoding='utf-8')) for p in (FOLDER.parent/'results').glob('*.json')}

spec = importlib.util.spec_from_file_location('experiment', FOLDER/'experiment.py')
experiment = importlib.util.module_from_spec(spec)
spec.loader.exec_module(experiment)

def source(cell): return ''.join(cell.source)

def printed(cell): # all text, however the stream was cut into pieces; figures are not compared
    def text(out):
        data = out.get('data', {})
        return out.get('text') or data.get('text/markdown') or ('' if 'image/png' in data else data.get('text/plain', ''))
    texts = (''.join(text(out)).strip() for out in cell.get('outputs', []))
    return '\n'.join(t for t in texts if t)

@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_every_printed_table_follows_from_the_results(path):
    cells = read_nb(path).cells
    files = re.findall(r"recorded\('\.\./results/([\w-]+\.json)'", ''.join(map(source, cells)))
    assert all((FOLDER.parent/'results'/name).is_file() for name in files) # or the experiment would run here
    shell, compared = CaptureShell(path), 0
    shell.run_cell('%matplotlib inline')
    with contextlib.chdir(path.parent):
        for cell in cells[:1 + max(i for i, c in enumerate(cells) if printed(c))]: # the rest prints nothing
            if source(cell).startswith('## The smallest form'): break # runs with the notebook's own tests
            if cell.cell_type != 'code': continue
            before = printed(cell)
            shell.cell(cell)
            if shell.exc: raise shell.exc
            assert printed(cell) == before, source(cell)
            compared += bool(before)
    assert compared >= 2

def test_the_first_page_repeats_the_verdicts():
    readme, left = (FOLDER.parent.parent/'README.md').read_text(encoding='utf-8'), {}
    rows = re.findall(r'^\| \[.+?\]\(nbs/experiments/(\w+)\.ipynb\) \| .+? \| ([✓≈?✗]) \| \*\*(.+?)\*\*(.+)', readme, re.M)
    for name, mark, figure, more in rows:
        text = '\n'.join(source(c) if c.cell_type == 'markdown' else printed(c) for c in read_nb(FOLDER/f'{name}.ipynb').cells)
        said = left.setdefault(name, re.findall(r'## The verdict.*\s+\*\*(.+?)[.]?\*\*', text)).pop(0)
        assert mark == ('≈' if said.startswith('Holds in') else '✓' if said.startswith('Holds') else '?' if said.startswith('Undecided') else '✗'), name
        computed = '\n'.join(printed(c) for c in read_nb(FOLDER/f'{name}.ipynb').cells)
        for n in re.findall(r'[\d.]*\d', (figure + more).replace('95 %', '').replace('H100', '')): # all its numbers
            assert re.search(rf'(?<![\d.]){re.escape(n)}(?![\d.]*\d)', computed), (name, n)
    assert len(rows) == 5 # claims of the paper
    kept = {t['kept']: t['ms'] for t in RESULTS['figure1']['times']['All-attention']} # computed: the page has other shares
    assert {name: figure for name, _, figure, _ in rows}['speed'] == f'{100 * kept[16] / kept[32]:.0f} %'

def test_pages_are_short_and_compute_their_intervals():
    for path in NOTEBOOKS:
        cells = read_nb(path).cells
        tables = [t for c in cells for t in re.findall(r'^\|(?:---\|)?(?:---:?\|)+$', printed(c) if c.cell_type == 'code' else source(c), re.M)]
        assert len(cells) <= 12 and len(tables) <= 2 and all(t.count('---') <= 5 for t in tables), path.stem
        typed = [m for c in cells if c.cell_type == 'markdown' for m in re.findall(r'\d\.\d+\)? (?:to|±) [-+]?\d', source(c))]
        assert not typed, (path.stem, typed) # intervals are computed

HEADS = ', the heads of leave_one_out'

def test_cards_of_the_models_have_the_recorded_scores():
    found = RESULTS
    def gated(runs, lam): return next(f for f in runs if (f['recipe']['seed'], f['recipe']['lam']) == (0, lam))
    for name, start, runs, lam, best, form in (
            ('tiny-books', 'baselines', found['choice']['gates'], .08, found['best'], '.3f'),
            ('tiny-books-word', 'baselines-word', found['table1']['runs'], .05, found['best-word'], '.1f')):
        cards = {x: (shipped()[name + x]/'README.md').read_text(encoding='utf-8') for x in ('', '-pruned', '-best')}
        first = next(x for x in found[start]['runs'] if (x['recipe']['optimizer'], x['recipe']['seed']) == ('adamw', 0))
        f, ours = gated(runs, lam), [x for x in best['runs'] if x['seed'] == 0]
        rows = {row['model']: row for row in f['rows']} | {'control': experiment.by_seed(runs, 'control')[0]}
        words = 'word' in name # with dropout
        mine = next(x for x in ours if x['heads'] in ('best', 'own') and x['lam'] == lam and x['change'].count(',') == 3 - words and ('no dropout' in x['change']) != words)
        whole = next(x for x in ours if x['heads'] == 'all' and x['change'].removesuffix(HEADS) == mine['change'].removesuffix(HEADS))
        for split in ('valid', 'test'):
            def row(*models): return ' | '.join(format(m[split], form) for m in models) + ' |'
            assert f'| {split}, first 50,000 | {row(first)}' in cards['']
            assert f"| {split}, first 50,000 | {row(rows['baseline'], rows['control'], rows['pruned'])}" in cards['-pruned']
            assert f"| {split} | {row(whole, rows['pruned'], mine)}" in cards['-best']
        for kept, x in ((f['keep'], '-pruned'), (mine['keep'], '-best')):
            assert json.loads((shipped()[name + x]/'keep.json').read_text()) == kept
            assert LM.from_pretrained(name + x).cfg.heads == [sum(layer) for layer in kept]

CASES = dict(seeds=(1, 0, 0), passages=(0, 1, 0), both=(.2, 1, 0), mixed=(1, 2, 1)) # standard deviation of seeds, passages, the rest

@pytest.mark.parametrize('seeds, passages, case, low, high', [
    (3, 40, 'seeds', .93, .97), (3, 40, 'passages', .92, .96), (3, 40, 'both', .95, .99), (3, 40, 'mixed', .93, .98), (5, 20, 'mixed', .93, .98),
    (10, 64, 'seeds', .93, .97), (3, 1, 'seeds', .93, .97), (1, 40, 'passages', .92, .96)])
def test_intervals_cover_the_mean(seeds, passages, case, low, high):
    "The bootstrap of seeds and passages covers 74 to 92 %, Student's t over seeds 0 % where only passages vary."
    draw, inside = np.random.default_rng(0), []
    for _ in range(2_000):
        parts = (draw.normal(size=size) for size in ((seeds, 1), (1, passages), (seeds, passages)))
        left, right = experiment.interval(sum(scale * x for scale, x in zip(CASES[case], parts)))
        inside.append(left <= 0 <= right)
    assert low < np.mean(inside) < high

def test_an_interval_of_one_number_is_refused():
    with pytest.raises(ValueError, match=r'x.shape=\(1, 1\)'): experiment.interval(np.ones((1, 1)))

def training(phase, recipe, environment, corpus=None): # everything that decides the outcome of a training run
    aside = ['log_every', 'save_every', 'valid_every', 'corpus']
    if phase != 'gated': aside += ['output_scale', 'sparsity', *(f for f in recipe if f.startswith(('lam', 'gate_')))]
    if phase == 'baseline': aside += [f for f in recipe if f.startswith('prune_')]
    settings = {f: x for f, x in recipe.items() if f in SETTINGS and f not in aside}
    if phase != 'gated': settings['gate_steps'] = 0
    where = [environment[k] for k in ('threads', 'torch', 'python', 'processor')]
    return phase, corpus or recipe['corpus'], *where, repr(get_recipe('text8', **settings))

def trainings(found): # of all result files: the training run, and its heads, bits or perplexity
    runs = [f for n in ('tiny', 'table1') for f in found[n].get('runs', [found[n]])]
    runs += found['choice']['gates'] + found['choice']['early']
    for f in runs:
        for row in f['rows']:
            if row['model'] not in f.get('curves', ('baseline', 'control', 'gated')): continue # a copy, or pruned
            heads = {'heads': [sum(layer) for layer in f['keep']]} if row['model'] == 'gated' else {}
            scores = {k: row[k] for k in ('valid', 'test')}
            yield training(row['model'], f['recipe'], f['environment'], f['corpus']), heads | scores
    f = found['table3']
    for x in f['starts']: # the baseline is a copy
        run = training('control', f['recipe'] | dict(seed=x['seed']), f['environment'])
        yield run, {k: x['control'][k] for k in ('valid', 'test')}

def test_equal_training_runs_have_one_result_in_all_files():
    first, compared = {}, 0
    for key, now in trainings(RESULTS):
        was = first.setdefault(key, now)
        compared += was is not now
        for k in now.keys() & was.keys(): assert now[k] == pytest.approx(was[k], abs=1e-6, rel=0), key
    assert compared >= 3
