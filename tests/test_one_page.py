"The page that holds the whole method: its promises of size, of standing alone, and of opening with what it computes."
import ast, json, re, statistics
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
CELLS = json.loads((ROOT/'nbs'/'one_page.ipynb').read_text(encoding='utf-8'))['cells']
CODE = [''.join(c['source']) for c in CELLS if c['cell_type'] == 'code']
TEXT = '\n'.join(''.join(c['source']) for c in CELLS if c['cell_type'] == 'markdown')
OUTPUTS = '\n'.join(''.join(o.get('text', [])) for c in CELLS for o in c.get('outputs', []))
METHOD = [s for s in CODE[:-1] if not s.startswith('#| code-fold: true')]

def found(pattern): return re.search(pattern, OUTPUTS)[1]

def test_180_lines_of_at_most_90_characters():
    lines = [line for s in METHOD for line in s.splitlines() if line.strip() and not line.strip().startswith('#')]
    assert len(lines) <= 180
    assert max(len(line) for s in CODE for line in s.splitlines()) <= 90

def test_it_takes_a_text_from_the_package_and_no_more():
    imports = [node for s in CODE[:-1] for node in ast.walk(ast.parse(s)) if isinstance(node, ast.Import|ast.ImportFrom)]
    ours = [ast.unparse(node) for node in imports if 'allatt_prune' in ast.unparse(node)]
    assert ours == ['from allatt_prune import load_corpus']

def test_four_pictures():
    shown = sum('image/png' in o.get('data', {}) for c in CELLS for o in c.get('outputs', []))
    assert shown + len(re.findall(r'!\[', TEXT)) == 4

def test_it_opens_with_what_it_computes():
    whole, small = (int(found(rf'{name} +([\d,]+) parameters').replace(',', '')) for name in ('control', 'pruned'))
    kept = sum(json.loads(found(r'open heads: (\[.*\])')))
    claim = re.search(r'\*\*We delete (\d+) of (\d+) heads\. .*? (\d+) % fewer .*? (\d+) % less .*? needs ([\d.]+) bits', TEXT)
    removed, heads, params, time, bits = map(float, claim.groups())
    assert heads - removed == kept and params == round(100 * (1 - small/whole))
    assert time == float(found(r'after: (\d+)% less')) and abs(bits - float(found(r'control: \+([\d.]+) bits'))) < .006

def test_its_last_cell_compared_it_with_the_package():
    assert 'equal to 1e-5: attention, gates, three steps of training, evaluation, removal' in OUTPUTS
    losses = {name: float(found(rf'{name} .* ([\d.]+) bits per character')) for name in ('baseline', 'control', 'pruned')}
    assert losses['control'] < losses['pruned'] < losses['baseline'] # as the text says

def test_random_heads_cost_what_it_says():
    gained, costs = [], []
    for seed in range(3):
        _, control, gates, *others = json.loads((ROOT/'nbs'/f'results/one_page/{seed}.json').read_text())['rows']
        gained += [gates['bits']['page'] - x['bits']['page'] for x in others]
        costs.append(f"{gates['bits']['page'] - control['bits']['page']:.3f}")
    assert 'With two other seeds it was {} and {} on this text'.format(*costs[1:]) in TEXT
    by_seed = [sum(gained[i:i+3]) / 3 for i in (0, 3, 6)]
    half = 4.303 * statistics.stdev(by_seed) / 3**.5 # Student's t, three seeds
    assert '95 % interval is {:.3f} to {:.3f} and holds 0'.format(statistics.mean(by_seed) - half, statistics.mean(by_seed) + half) in TEXT
    less, cases, bits = re.search(r'in (\d) of (\d) trials, by ([\d.]+) bits', TEXT).groups()
    assert (int(less), int(cases)) == (sum(x > 0 for x in gained), len(gained)) and float(bits) == round(sum(gained) / len(gained), 3)

def test_its_other_figures():
    from allatt_prune.config import RECIPES
    from allatt_prune.cost import count_params
    from allatt_prune.gates import l0_prob
    import torch
    def persistent(cfg): # share of a head
        few, many = (count_params(replace(cfg, heads=[n] * cfg.n_layer))['blocks'] for n in (1, 2))
        return round(100 * 2 * cfg.n_persistent * cfg.d_head * cfg.n_layer / (many - few))
    paper = RECIPES['text8'].config(27)
    ours = replace(paper, n_layer=4, d_model=96, n_persistent=96)
    assert f"persistent vectors are {persistent(paper)} % of a head's parameters; on this page, {persistent(ours)} %" in TEXT
    two = torch.tensor(2.)
    odds = [f'{x:.2f}'.lstrip('0') for x in (two.sigmoid(), l0_prob(two))]
    assert 'open with probability {} and pays with probability {}'.format(*odds) in TEXT
    score, gates = re.search(r'its heads cost (\d+)% less than random heads, those of gates (\d+)% less', (ROOT/'README.md').read_text(encoding='utf-8')).groups()
    assert f'random heads cost most, those of gates {gates} % less, and those of *leave_one_out*, a score without training, {score} % less' in TEXT
