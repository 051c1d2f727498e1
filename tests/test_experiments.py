"What the experiments print is what their files of results say."
import contextlib, copy, json, re, shlex
from pathlib import Path
import pytest
from execnb.nbio import read_nb
from execnb.shell import CaptureShell
from allatt_prune.engine.cli import main
from allatt_prune.engine.run import stored_recipe
from allatt_prune.experiment import SMALL, command
from allatt_prune.config import get_recipe

FOLDER = Path(__file__).parent.parent/'nbs'/'experiments'
NOTEBOOKS = sorted(p for p in FOLDER.glob('[!_]*.ipynb') if p.stem != 'experiment') # _: not run yet
RESULTS = {p.stem: json.loads(p.read_text(encoding='utf-8')) for p in (FOLDER.parent/'results').glob('*.json')}

def printed(cell): # texts; figures are not compared
    for out in cell.get('outputs', []):
        data = out.get('data', {})
        plain = '' if 'image/png' in data else data.get('text/plain', '')
        text = out.get('text') or data.get('text/markdown') or plain
        yield ''.join(text).strip()

@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_every_printed_table_follows_from_the_results(path):
    files = re.findall(r"'\.\./results/([\w-]+)\.json'", ''.join(''.join(c.source) for c in read_nb(path).cells))
    assert all((FOLDER.parent/'results'/f'{name}.json').exists() for name in files) # or it would be made here
    assert files or path.stem in ('books', 'speed')
    shell, compared = CaptureShell(), 0
    shell.run_cell('%matplotlib inline')
    with contextlib.chdir(path.parent):
        for cell in read_nb(path).cells:
            source = ''.join(cell.source)
            if source.startswith('## The smallest form'): break                     # that runs with the notebook's own tests
            if cell.cell_type != 'code': continue
            before = '\n'.join(t for t in printed(cell) if t)
            shell.cell(cell)
            if shell.exc: raise shell.exc
            assert '\n'.join(t for t in printed(cell) if t) == before, source # however the stream was cut into pieces
            compared += bool(before)
    assert compared >= 2

def test_the_first_page_says_what_the_verdicts_say():
    readme = (FOLDER.parent.parent/'README.md').read_text(encoding='utf-8')
    for path in NOTEBOOKS:
        text = ''.join(''.join(c.source) + '\n' for c in read_nb(path).cells if c.cell_type == 'markdown')
        after = text.partition('## The verdict')[2]
        if not after: continue # these test no claim of the paper
        verdict = re.match(r'\s*(\*\*.+?\*\*.*?\.)(?=\s)', after)[1]                     # with its first sentence
        lines = [line for line in readme.splitlines() if f'experiments/{path.name})' in line]
        said = [line for line in lines if line.endswith(f'| {verdict} |')]
        assert said, f'{path.name}: README.md does not say {verdict}'

def test_the_line_for_the_shell_makes_a_run_of_that_recipe(tmp_path):
    changes = dict(SMALL, unit='word', cutoffs=(200, 500), output_scale=False, gate_init=-1.5, seed=3, lam=.25)
    whole, pruned = str(tmp_path/'a run'), str(tmp_path/'pruned')
    for line, lam in ((command('wt103', **changes, run_dir=whole), .25),
                      (command(None, f'{whole}/baseline', lam=.5, run_dir=pruned), .5)):
        words = shlex.split(line.replace('\\\n', ''))
        main(words[1:])
        assert stored_recipe(words[-1]) == get_recipe('wt103', **changes | dict(lam=lam))

def test_two_values_have_no_spread():
    for name, seeds in (('table1', 3), ('differences', 2), ('table3', 3)):
        cells = [c for c in read_nb(FOLDER/f'{name}.ipynb').cells if c.cell_type == 'code']
        text, found = '\n'.join(t for cell in cells for t in printed(cell)), RESULTS[name]
        rows = found['rows'] if 'rows' in found else [run['recipe'] for run in found['runs']]
        assert len({x['seed'] for x in rows}) == seeds
        assert ('±' in text) == (seeds > 2), name

def test_the_list_of_differences_names_what_is_measured():
    sources = [''.join(c.source) for c in read_nb(FOLDER/'differences.ipynb').cells]
    text = next(s for s in sources if s.startswith('## The list'))
    named = re.findall(r'\| \*\*(\w+)\*\* \|$', text, re.M)
    assert {*named, 'start', 'reference', 'exact'} == {r['name'] for r in RESULTS['differences']['rows']}
    assert len(named) == len(set(named))

def training(phase, recipe, environment, corpus=None): # what decides on the outcome of a training
    aside = ['log_every', 'save_every', 'valid_every', 'corpus', 'vocab', 'heads']
    if phase != 'gated': aside += [f for f in recipe if f.startswith(('lam', 'gate_')) or f in ('output_scale', 'l0_exact', 'sparsity')]
    if phase == 'baseline': aside += [f for f in recipe if f.startswith('prune_')]
    settings = {f: x for f, x in recipe.items() if f not in aside} | ({} if phase == 'gated' else dict(gate_steps=0))
    where = [environment[k] for k in ('threads', 'torch', 'python', 'processor')]
    return phase, corpus or recipe['corpus'], *where, repr(get_recipe('text8', **settings))

def trainings(found): # of all results: which training it was, and heads of each layer, bits or perplexity
    runs = [f for n in ('tiny', 'books', 'books-word', 'table1', 'figure3') for f in found[n].get('runs', [found[n]])]
    for f in runs + found['choice']['gates'] + [f for f in found['choice']['early'] if f['part'] == 64]: # others begin elsewhere
        for row in f['rows']:
            if row['model'] not in f.get('curves', ('baseline', 'control', 'gated')): continue # pruned is gated; or a copy from another run
            heads = {'heads': [sum(layer) for layer in f['keep']]} if row['model'] == 'gated' else {}
            yield training(row['model'], f['recipe'], f['environment'], f['corpus']), heads | {k: row[k] for k in ('valid', 'test')}
    for x in (f := found['table3'])['starts']: # the baseline is a copy
        yield training('control', f['recipe'] | dict(seed=x['seed']), f['environment']), {k: x['control'][k] for k in ('valid', 'test')}
    f = found['tuning']
    same = lambda env: (env['threads'], env['torch'])
    for x in f['paths'] + [x for x in f['again'] if same(x['environment']) != same(f['environment'])]: # the others are copies
        of = lambda phase, **changes: training(phase, f['recipe'] | changes, x.get('environment', f['environment']))
        for phase in ('baseline', 'control'): yield of(phase, seed=x['seed']), {'valid': x[phase]}
        for p in x['pruned']: yield of('gated', seed=x['seed'], lam=p['lam']), {k: p[k] for k in ('heads', 'valid')}
    for x in f['optimizers']:
        recipe = f['recipe'] | {k: x[k] for k in ('optimizer', 'lr', 'seed')}
        yield training('baseline', recipe, f['environment']), {'valid': x['valid']}

def contradictions(found): # between trainings that were the same; how many were compared
    first, wrong, compared = {}, [], 0
    for key, now in trainings(found):
        was = first.setdefault(key, now)
        compared += was is not now
        if any(now[k] != pytest.approx(was[k], abs=1e-6, rel=0) for k in now.keys() & was.keys()): wrong.append((key, was, now))
    return wrong, compared

def test_the_same_training_has_one_result_everywhere():
    wrong, compared = contradictions(RESULTS)
    assert not wrong and compared >= 4                                              # three of them in table3 and choice

@pytest.mark.parametrize('change', [
    lambda found: found['table3']['starts'][0]['control'].update(valid=2.06749),
    lambda found: found['choice']['early'][-1]['rows'][-1].update(test=1.8),
    lambda found: next(x for x in found['tuning']['optimizers'] if x['lr'] == found['tuning']['recipe']['lr']).update(valid=2.)])
def test_a_changed_digit_is_noticed(change):
    found = copy.deepcopy(RESULTS)
    change(found)
    assert contradictions(found)[0]
