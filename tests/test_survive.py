"What breaks a training: kills, signals, full disks, damaged files, numbers that are none."
import ast, json, os, random, re, resource, shutil, signal, subprocess, sys, time, warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest, torch
import allatt_prune
from allatt_prune import checkpoint, cli
from allatt_prune import train as training
from allatt_prune.train import Stopped, get_recipe

RHYME = 'one two buckle my shoe three four knock at the door '
SMALL = dict(n_layer=2, d_model=32, n_head=4, n_persistent=16, seg_len=16, mem_len=16, batch=4, dropout=.1, attn_dropout=.1, log_every=1, save_every=4, valid_every=5,
             steps=12, warmup=2, prune_steps=14, prune_warmup=2, lam_warmup=4, gate_steps=8, gate_lr=.3, lam=.5)
FILES = [*(f'{m}/{f}.safetensors' for m in ('baseline', 'control', 'gated', 'pruned') for f in ('model', 'gates') if f == 'model' or m == 'gated'), 'metrics.jsonl']

def same(a, b): return [f for f in FILES if (a/f).read_bytes() != (b/f).read_bytes()] == []

@pytest.fixture(scope='module')
def world(tmp_path_factory): # a text of 7 segments and what a run on it gives
    folder = tmp_path_factory.mktemp('world')
    (folder/'own.txt').write_text(RHYME * 10)
    (folder/'long.txt').write_text(RHYME * 200)                                         # a validation takes as long as ten steps
    os.environ['ALLATT_PRUNE_CACHE'] = str(folder/'cache')
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    torch.set_num_threads(threads)

def go(name, resume=False, models=cli.MODELS, **changes):
    return cli.run(get_recipe('tiny', **dict(SMALL, corpus='own.txt') | changes), run_dir=name, device='cpu', resume=resume, models=models)

# ---- exact resume

class Crash(BaseException): "Ends the process as it is: nothing is saved on the way."

PLACES = dict(baseline=('baseline', 3), epoch_end=('baseline', 6), control=('control', 5), warm_up=('gated', 2), gating=('gated', 5),
              before_freezing=('gated', 7), after_freezing=('gated', 8), fine_tuning=('gated', 12), last_step=('gated', 13))

@pytest.mark.parametrize('how,optimizer', (('signal', 'adamw'), ('crash', 'adamw'), ('signal', 'lamb')))
def test_resume_gives_the_same_bits(world, monkeypatch, how, optimizer):
    step = training._step
    kinds = dict(optimizer=optimizer, gate_optimizer='lamb' if optimizer == 'lamb' else 'adam')
    go(whole := f'whole-{optimizer}-{how}', **kinds)
    freezes = []
    for name, place in PLACES.items() if optimizer == 'adamw' else [*PLACES.items()][::4]:
        def interrupted(s, *args):
            if (s.phase, s.step) == place and how == 'signal': os.kill(os.getpid(), random.choice((signal.SIGTERM, signal.SIGINT)))
            out = step(s, *args)
            if (s.phase, s.step - 1) == place and how == 'crash': raise Crash
            return out
        monkeypatch.setattr(training, '_step', interrupted)
        with pytest.raises((Stopped, Crash)): go(f'{name}-{optimizer}-{how}', **kinds)
        monkeypatch.setattr(training, '_step', step)
        there = world/f'{name}-{optimizer}-{how}'
        last = sorted((there/'checkpoints').glob(f'{place[0]}-*'))
        if how == 'signal': assert last[-1].name == f'{place[0]}-{place[1] + 1:08d}'
        if place[0] == 'gated' and last: freezes.append(checkpoint.load(last[-1])[1]['gates']['frozen'].item())
        go(there.name, **kinds, resume=True)
        assert same(there, world/whole), name
        assert not [p for p in there.rglob('*') if '.tmp-' in p.name]
    if how == 'signal' and optimizer == 'adamw': assert freezes == [False, False, False, True, True, True]

def test_interrupted_again_and_again(world, monkeypatch):
    go('whole')
    step, calls = training._step, []
    def every_third(s, *args):
        calls.append(s.step)
        if len(calls) % 3 == 0: os.kill(os.getpid(), signal.SIGTERM)
        return step(s, *args)
    monkeypatch.setattr(training, '_step', every_third)
    ends = 0
    while True:
        try: go('often', resume=ends > 0); break
        except Stopped: ends += 1
    assert ends >= 12 and same(world/'often', world/'whole')

def test_in_the_middle_of_a_validation(world, monkeypatch):
    forward, pieces = allatt_prune.model.LM.forward, []
    def watched(self, *args):
        if not self.training:
            pieces.append(1)
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *args)
    monkeypatch.setattr(allatt_prune.model.LM, 'forward', watched)
    with pytest.raises(Stopped): go('valid', corpus='long.txt')
    monkeypatch.setattr(allatt_prune.model.LM, 'forward', forward)
    assert len(pieces) == 1 and (world/'valid'/'checkpoints'/'baseline-00000005').exists()     # it has two, and ended after the first
    go('valid', corpus='long.txt', resume=True)
    go('valid-whole', corpus='long.txt')
    assert same(world/'valid', world/'valid-whole')

def test_the_best_is_remembered(world, monkeypatch):
    scores = iter((1., 2., 3.))                                                         # worse each time
    monkeypatch.setattr(training, 'evaluate', lambda *args, **how: training.Score(next(scores)))
    step = training._step
    def interrupted(s, *args):
        if s.step == 7: os.kill(os.getpid(), signal.SIGTERM)
        return step(s, *args)
    recipe, text = get_recipe('tiny', **SMALL, corpus='own.txt'), allatt_prune.data.load_corpus('own.txt')
    make = lambda: allatt_prune.model.LM(recipe.config(len(text.vocab)))
    monkeypatch.setattr(training, '_step', interrupted)
    with pytest.raises(Stopped): training.train(make(), text, recipe, run_dir='best')
    monkeypatch.setattr(training, '_step', step)
    records = training.train(make(), text, recipe, run_dir='best', resume=True)
    assert [(r['step'], r['valid'], r['best']) for r in records if 'valid' in r] == [(5, 1., 1.), (10, 2., 1.)]

def test_the_text_must_be_the_same(world):
    (world/'changes.txt').write_text(RHYME * 10)
    go('changes', corpus='changes.txt', models=cli.MODELS[:1])
    for other in (RHYME * 9 + RHYME[::-1], RHYME[::-1] + RHYME * 9):                    # another test split, another training split
        (world/'changes.txt').write_text(other)
        with pytest.raises(allatt_prune.data.DataError, match='corpus=.*: not the text of the run in changes'): go('changes', corpus='changes.txt', resume=True)

def test_only_one_works_in_a_folder(world):
    cli._create(Path('busy'), None, recipe={})
    with cli._alone(Path('busy')):
        done = subprocess.run([sys.executable, '-c', 'from allatt_prune.cli import Path, _alone\nwith _alone(Path("busy")): print("in")'], capture_output=True, text=True)
    assert 'in\n' not in done.stdout and 'run_dir=busy: another process works there' in done.stderr

# ---- what people do to a run directory

def edited(world, name, change): # a finished or unfinished run, changed by `change(folder)`, and resumed
    if not (world/'done').exists(): go('done')
    shutil.copytree(world/'done', world/name)
    change(world/name)
    return go(name, resume=True)

def unfinished(folder): # as if killed while the gates were trained
    for f in ('gated', 'pruned'): shutil.rmtree(folder/f)
    (folder/'report.json').unlink()

RUBBISH = 'rubbish\n', 'null\n', '[]\n', '{"phase": 1, "steps": ""}\n', '[' * 100_000 + '\n', b'\xff\n'

@pytest.mark.parametrize('file', ('recipe.json', 'corpus.json'))
@pytest.mark.parametrize('i', range(len(RUBBISH)))
def test_damaged_files_of_a_run_are_named(world, file, i):
    def damage(folder):
        unfinished(folder)
        (folder/file).write_bytes(RUBBISH[i] if isinstance(RUBBISH[i], bytes) else RUBBISH[i].encode())
    with pytest.raises(OSError, match=f'run_dir=.*: {file} is damaged'): edited(world, f'damage-{file}-{i}', damage)

def flipped(data, rng):
    bit = rng.randrange(8 * len(data))
    return data[:bit//8] + bytes([data[bit//8] ^ 1 << bit % 8]) + data[bit//8 + 1:]

@pytest.mark.parametrize('file', ('recipe.json', 'corpus.json', 'manifest.json'))
def test_no_bit_of_what_a_run_began_with_can_change(world, file):
    edited(world, f'flip-{file}', unfinished)                                           # finished again; nothing is trained below
    path, rng = world/f'flip-{file}'/file, random.Random(file)
    data, refused = path.read_bytes(), 0
    for _ in range(30):
        path.write_bytes(flipped(data, rng))
        try: go(f'flip-{file}', resume=True)                                            # a wrong checksum of the report: it is made again
        except OSError as e: refused += bool(re.search(f'run_dir=flip-{file}: .*(damaged|no (recipe|corpus).json|in format)', str(e)))
        else:
            assert file == 'manifest.json'
            data = path.read_bytes()
        path.write_bytes(data)
    assert refused == 30 if file != 'manifest.json' else refused >= 8
    assert go(f'flip-{file}', resume=True) and same(world/f'flip-{file}', world/'done')

@pytest.mark.parametrize('i', range(len(RUBBISH)))
@pytest.mark.parametrize('file', ('metrics.jsonl', 'speed.jsonl'))
def test_damaged_records_are_refused_and_mended(world, file, i):
    name = f'records-{file}-{i}'
    def damage(folder):
        path = folder/file
        path.write_bytes((RUBBISH[i] if isinstance(RUBBISH[i], bytes) else RUBBISH[i].encode()) + path.read_bytes())
        with pytest.raises(OSError, match=f'{file}(: line 1)? is damaged'): training.read_metrics(folder)
        if i % 2: unfinished(folder)                                                    # a finished run is mended as well
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        edited(world, name, damage)
    assert same(world/name, world/'done') and training.read_metrics(name) == training.read_metrics('done')

def test_no_bit_of_a_record_can_change(world):
    if not (world/'done').exists(): go('done')
    shutil.copytree(world/'done', world/'bits')
    file, rng = world/'bits'/'metrics.jsonl', random.Random(0)
    data = file.read_bytes()
    for i in range(60):
        file.write_bytes(flipped(data, rng) if i % 2 else data[:rng.randrange(len(data))])
        with pytest.raises(OSError, match='bits.*is damaged'): training.read_metrics('bits')
        with pytest.raises(OSError, match='bits.*is damaged'): cli.outcome('bits')
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            training.mend_metrics('bits')
        assert file.read_bytes() == data

@pytest.mark.parametrize('file', ('report.md', 'report.json', 'gates.png', 'heads.png'))
def test_no_bit_of_a_report_can_change(world, file):
    name = f'report-{file}'
    def damage(folder): (folder/file).write_bytes(flipped((folder/file).read_bytes(), random.Random(file)))
    rows = edited(world, name, damage)                                                  # made again
    checkpoint.verify(world/name)
    assert cli.table(rows) in (world/name/'report.md').read_text() and json.loads((world/name/'report.json').read_text())['rows'] == rows
    (world/name/file).write_bytes(b'')
    if file == 'report.json':
        with pytest.raises(OSError, match='report.json is damaged'): cli.outcome(name)

def test_planted_links_are_not_followed(world):
    (world/'outside').mkdir()
    names = 'report.md', 'report.json', 'gates.png', 'heads.png', 'report.json.new', 'metrics.new', 'metrics.jsonl', 'speed.jsonl'
    def plant(folder):
        unfinished(folder)
        for n in names:
            (world/'outside'/n).write_text('precious')
            (folder/n).unlink(missing_ok=True)
            (folder/n).symlink_to(world/'outside'/n)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        edited(world, 'planted', plant)
    assert {p.read_text() for p in (world/'outside').iterdir()} == {'precious'} and len(names) == len([*(world/'outside').iterdir()])
    assert same(world/'planted', world/'done') and not [p for p in (world/'planted').iterdir() if p.is_symlink() and not p.name.endswith('.new')]
    (world/'fresh').mkdir()
    (world/'fresh'/'metrics.jsonl').symlink_to(world/'outside'/'new')                   # a training of its own, without a run
    recipe, text = get_recipe('tiny', **SMALL, corpus='own.txt'), allatt_prune.data.load_corpus('own.txt')
    with pytest.raises(OSError, match='metrics=.*fresh/metrics.jsonl: .*; put a file there'): training.train(allatt_prune.model.LM(recipe.config(len(text.vocab))), text, recipe, run_dir='fresh')
    assert not (world/'outside'/'new').exists()

def test_linked_checkpoints_end_a_training_before_it_begins(world, monkeypatch):
    (world/'linked').mkdir()
    (world/'linked'/'checkpoints').symlink_to(world/'outside2')
    (world/'outside2').mkdir()
    recipe, text = get_recipe('tiny', **SMALL, corpus='own.txt'), allatt_prune.data.load_corpus('own.txt')
    monkeypatch.setattr(training, '_step', pytest.fail)
    for resume in (False, True):
        with pytest.raises(OSError, match='checkpoint=linked/checkpoints: a link'):
            training.train(allatt_prune.model.LM(recipe.config(len(text.vocab))), text, recipe, run_dir='linked', resume=resume)
    assert not [*(world/'outside2').iterdir()]

@pytest.mark.parametrize('clock', ('stands', 'goes back'))
def test_a_clock_that_cannot_be_trusted(world, monkeypatch, clock):
    now = iter(range(10**6, 0, -1))
    monkeypatch.setattr(time, 'time', lambda: float(next(now)))
    if clock == 'stands': monkeypatch.setattr(time, 'monotonic', lambda: 5.)
    recipe, text = get_recipe('tiny', **SMALL, corpus='own.txt'), allatt_prune.data.load_corpus('own.txt')
    records = training.train(allatt_prune.model.LM(recipe.config(len(text.vocab))), text, recipe)
    assert all(r['tokens_per_s'] > 0 for r in records)
    assert cli.recorded(f'clock-{clock}.json', dict)['seconds'] >= 0

@pytest.mark.parametrize('text', ('[]', '{"rows": 5}', '{"rows": [1]}', '{"rows": [{"model": "gated"}]}'))
def test_a_finished_run_is_looked_at(world, text):
    name = f'finished{len(text)}'
    def forge(folder): # whose checksum is right
        (folder/'report.json').write_text(text)
        checkpoint.seal(folder, [p.name for p in folder.iterdir() if p.suffix in ('.json', '.md', '.png') and p.name != 'manifest.json'])
    rows = edited(world, name, forge)                                                   # made again
    assert [r['model'] for r in rows] == list(cli.ROWS) and json.loads((world/name/'report.json').read_text())['rows'] == rows

def test_a_model_that_was_lost_is_made_again(world):
    edited(world, 'lost', lambda folder: shutil.rmtree(folder/'pruned'))
    assert same(world/'lost', world/'done')
    with pytest.raises(OSError, match='checkpoint=lost2/baseline: model.safetensors is damaged'): edited(world, 'lost2', lambda folder: (folder/'baseline'/'model.safetensors').write_text('xx'))
    with pytest.raises(FileNotFoundError, match='run_dir=lost3: no corpus.json'): edited(world, 'lost3', lambda folder: (folder/'corpus.json').unlink())

def test_lost_records_are_written_again(world):
    def lose(folder):
        unfinished(folder)
        lines = (folder/'metrics.jsonl').read_text().splitlines(keepends=True)
        (folder/'metrics.jsonl').write_text(''.join(lines[:-5] + lines[-4:]))
    with pytest.warns(UserWarning, match='metrics=.*: lines were damaged or lost; written again from a checkpoint'): edited(world, 'lose', lose)
    assert same(world/'lose', world/'done')

def test_other_circumstances_are_said(world):
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match='threads=2: .*checkpoints/gated was made with 1, and each sums up a part, so sums are rounded in another order'): edited(world, 'threads', unfinished)
    finally: torch.set_num_threads(1)

def test_another_start_is_another_training(world):
    recipe, text = get_recipe('tiny', **SMALL, corpus='own.txt'), allatt_prune.data.load_corpus('own.txt')
    make = lambda: allatt_prune.model.LM(recipe.config(len(text.vocab)))
    training.train(make(), text, recipe, run_dir='start')
    with pytest.raises(ValueError, match='start=3: .*was made with 0'): training.train(make(), text, recipe, run_dir='start', start=3, resume=True)

@pytest.mark.parametrize('change', (dict(step=-3), dict(step=10**9), dict(step='x'), dict(best='x'), dict(phase='gated'), dict(recipe={'steps': 'x'}), dict(recipe=None)))
def test_forged_states(world, change):
    recipe, text = get_recipe('tiny', **SMALL, corpus='own.txt'), allatt_prune.data.load_corpus('own.txt')
    make, name = lambda: allatt_prune.model.LM(recipe.config(len(text.vocab))), f'forged-{change}'.replace('/', '')
    training.train(make(), text, recipe, run_dir=name)
    newest = sorted((world/name/'checkpoints').iterdir())[-1]
    config, parts = checkpoint.load(newest)
    shutil.rmtree(newest)
    checkpoint.save(newest, config | change, **parts)
    with pytest.raises(OSError, match='checkpoint=.*: not a state of'): training.train(make(), text, recipe, run_dir=name, resume=True)

@pytest.mark.parametrize('change', (dict(mems=[1]), dict(optimizer0={'x': torch.ones(1)}), dict(optimizer0_settings=dict(groups=[], state={})), dict(model=[1])))
def test_forged_parts(world, change):
    recipe, text = get_recipe('tiny', **SMALL, corpus='own.txt'), allatt_prune.data.load_corpus('own.txt')
    make, name = lambda: allatt_prune.model.LM(recipe.config(len(text.vocab))), f'parts-{[*change][0]}'
    training.train(make(), text, recipe, run_dir=name)
    newest = sorted((world/name/'checkpoints').iterdir())[-1]
    config, parts = checkpoint.load(newest)
    shutil.rmtree(newest)
    checkpoint.save(newest, config, **parts | change)
    with pytest.raises(OSError, match='checkpoint=.*: not (a state of|tensors)'): training.train(make(), text, recipe, run_dir=name, resume=True)

# ---- numbers that are none

@pytest.mark.parametrize('what', ('loss', 'gradient', 'gate gradient'))
@pytest.mark.parametrize('value', (float('nan'), float('inf')))
@pytest.mark.parametrize('dtype', ('float32', 'bfloat16'))
def test_stops_before_the_optimizer_moves(world, monkeypatch, what, value, dtype):
    backward, moved, name = training._backward, [], f'{what}-{value}-{dtype}'.replace(' ', '-')
    def poisoned(loss, model, gates, opts, clip):
        norms = backward(loss, model, gates, opts, clip)
        if gates is not None and len(moved) == 6:
            norms[0 if what == 'gradient' else 1] = torch.tensor(value)
        return norms
    adam = torch.optim.AdamW.step
    if what != 'loss': monkeypatch.setattr(training, '_backward', poisoned)
    monkeypatch.setattr(torch.optim.AdamW, 'step', lambda self, *a: (moved.append(1), adam(self, *a))[1])
    both = training._Both.forward
    def forward(self, x, y, mems, lam, seed, step):
        loss, nll, mems = both(self, x, y, mems, lam, seed, step)
        return (loss, nll * value, mems) if what == 'loss' and self.gates is not None and step == 6 else (loss, nll, mems)
    monkeypatch.setattr(training._Both, 'forward', forward)
    recipe = get_recipe('tiny', **SMALL, corpus='own.txt', dtype=dtype)
    text = allatt_prune.data.load_corpus('own.txt')
    model = allatt_prune.model.LM(recipe.config(len(text.vocab)))
    gates = allatt_prune.gates.HeadGates(2, 4)
    with pytest.raises(FloatingPointError, match=r'loss=\S+: gated diverged at step 6, gradient norm \S+; give a smaller'):
        training.train(model, text, recipe, gates, world/name)
    assert len(moved) == 6
    config, parts = checkpoint.newest(world/name/'checkpoints', 'gated')
    assert config['step'] == 4 and all(x.isfinite().all() for part in parts.values() for x in (part.values() if isinstance(part, dict) else ()) if torch.is_tensor(x))

def test_clipping_under_bfloat16(world, monkeypatch):
    adam, norms = torch.optim.AdamW.step, []
    def watched(self, *a):
        grads = [p.grad for g in self.param_groups for p in g['params']]
        assert {g.dtype for g in grads} == {torch.float32}
        norms.append(torch.stack([g.norm() for g in grads]).norm().item())
        return adam(self, *a)
    monkeypatch.setattr(torch.optim.AdamW, 'step', watched)
    text = allatt_prune.data.load_corpus('own.txt')
    recipe = get_recipe('tiny', **SMALL | dict(dtype='bfloat16', clip=.5), corpus='own.txt')
    before = [r['grad_norm'] for r in training.train(allatt_prune.model.LM(recipe.config(len(text.vocab))), text, recipe)]
    assert len(norms) == len(before) and max(before) > .6                               # there was something to clip
    assert all(abs(after - min(was, .5)) < 1e-3 for was, after in zip(before, norms))

def test_what_is_not_finite_is_not_saved(world):
    recipe, text = get_recipe('tiny', **SMALL, corpus='own.txt'), allatt_prune.data.load_corpus('own.txt')
    model = allatt_prune.model.LM(recipe.config(len(text.vocab)))
    s = training._State('baseline', recipe, text, model, None, training.make_optimizers(model, None, recipe))
    training._save(s, 'finite')
    with torch.no_grad(): model.pos[0, 0] = float('inf')
    s.step = 1
    with pytest.raises(FloatingPointError, match='pos=inf: model diverged in baseline before step 1'): training._save(s, 'finite')
    assert checkpoint.newest('finite/checkpoints', 'baseline')[0]['step'] == 0

# ---- damaged files

@pytest.fixture(scope='module')
def saved(world):
    go('damage')
    return world/'damage'/'checkpoints'

@pytest.mark.parametrize('how', ('cut', 'flip'))
def test_damage_is_refused_by_name(world, saved, how):
    rng, newest = random.Random(how), sorted(saved.glob('gated-*'))[-1]
    files, warned = sorted(newest.iterdir()), 0
    assert len(files) == 10 and len(sorted(saved.glob('gated-*'))) == 2
    older = checkpoint.load(sorted(saved.glob('gated-*'))[0])[0]['step']
    for i in range(200):
        file = files[i % len(files)]
        data = file.read_bytes()
        bit = rng.randrange(8 * len(data))
        file.write_bytes(data[:bit // 8] if how == 'cut' else data[:bit//8] + bytes([data[bit//8] ^ 1 << bit % 8]) + data[bit//8 + 1:])
        with pytest.raises(OSError, match=str(newest)): checkpoint.load(newest)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            assert checkpoint.newest(saved, 'gated')[0]['step'] == older
        warned += len(said) == 1 and str(newest) in str(said[0].message) and 'going back' in str(said[0].message)
        file.write_bytes(data)
    assert warned == 200 and checkpoint.newest(saved, 'gated')[0]['step'] > older

def test_resumes_from_the_older_one_and_says_so(world):
    go('whole-d')
    shutil.copytree('whole-d', 'older')
    for f in ('gated', 'pruned'): shutil.rmtree(f'older/{f}')
    Path('older/report.json').unlink()
    file = sorted(Path('older/checkpoints').glob('gated-*'))[-1]/'model.safetensors'
    file.write_bytes(file.read_bytes()[:-1])
    done = subprocess.run([sys.executable, '-m', 'allatt_prune', 'run', '--run-dir', 'older', '--resume'], capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS='1'))
    assert done.returncode == 0 and done.stderr.count('\n') == 1, done.stderr
    assert done.stderr.startswith(f'allatt-prune: warning: checkpoint={file.parent}: model.safetensors is damaged') and 'going back' in done.stderr
    assert same(world/'older', world/'whole-d')

# ---- killed while saving; a full disk

SAVER = '''
import os, random, signal, sys, time, torch
from pathlib import Path
from allatt_prune import checkpoint
torch.set_num_threads(1)
folder, rng, hit = Path(sys.argv[1]), random.Random(0), 0
for i in range(int(sys.argv[2])):
    found = checkpoint.newest(folder, 'x')
    first = found[0]['step'] + 1 if found else 0
    pid = os.fork()
    if pid == 0:
        for step in range(first, 10**6): checkpoint.save_step(folder, 'x', step, dict(step=step), model={str(k): torch.full((50_000,), float(step)) for k in range(4)}, more=[step])
    while not list(folder.glob('x-*')): time.sleep(.01)
    time.sleep(rng.uniform(.02, .2))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    hit += bool(list(folder.glob('.x-*.tmp-*')))
    config, parts = checkpoint.newest(folder, 'x')                                     # and no warning: none that has a name is damaged
    names = sorted(p.name for p in folder.glob('x-*'))
    assert config['step'] >= first - 1 and all((x == config['step']).all() for x in parts['model'].values()) and parts['more'] == [config['step']]
    assert names[-1] == f"x-{config['step']:08d}" and 1 <= len(names) <= 3, names
checkpoint.save_step(folder, 'x', 10**7, {})
print(hit, len(list(folder.glob('.x-*'))))
'''

def test_killed_while_saving(world):
    (world/'saver').mkdir()
    done = subprocess.run([sys.executable, '-W', 'error', '-c', SAVER, 'saver', '20'], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    hit, left = map(int, done.stdout.split())
    assert hit >= 5 and left == 0                                                       # the kills did fall into the writing; what they left is swept

def test_disk_full(world):
    go('full', models=cli.MODELS[:1], steps=4)                                          # a run of which only the baseline is there
    good = {p: p.read_bytes() for p in (world/'full').rglob('*') if p.is_file()}
    limit = 50_000
    done = subprocess.run([sys.executable, '-m', 'allatt_prune', 'run', '--run-dir', 'full', '--resume'], capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    line, = done.stderr.strip().splitlines()
    assert done.returncode == 1 and line.startswith('allatt-prune: error: checkpoint=full/checkpoints/control-00000004: File too large, writing '), done.stderr
    assert int(line.split('writing ')[1].split(' bytes')[0].replace(',', '')) > limit
    assert all(p.read_bytes() == data for p, data in good.items() if p.name not in ('metrics.jsonl', 'speed.jsonl') and p != world/'full'/'manifest.json')
    checkpoint.verify(world/'full')                                                     # its manifest has let go of the report, which will be another
    assert sorted(p.name for p in (world/'full'/'checkpoints').iterdir()) == ['baseline-00000004']
    go('full', steps=4, resume=True)                                                    # room was made
    go('full-whole', steps=4)
    assert same(world/'full', world/'full-whole')

# ---- real signals to the real command

def shell(*args): return [sys.executable, '-m', 'allatt_prune', 'run', *args]

def test_real_signals(world):
    busy = dict(training=dict(save_every=0, valid_every=0), evaluation=dict(save_every=0, valid_every=1), saving=dict(save_every=1, valid_every=0))
    common = dict(SMALL, steps=40, prune_steps=40, gate_steps=20)
    env = os.environ | dict(OMP_NUM_THREADS='1')
    def options(what): return [x for k, v in {**common, **busy[what], 'corpus': 'long.txt'}.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    cases = [(what, sig) for what in busy for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM)] + [('report', signal.SIGTERM)]
    def one(i):
        (what, sig), name, rng = cases[i], f'signal{i}', random.Random(i)
        job = subprocess.Popen(shell(*options('training' if what == 'report' else what), '--run-dir', name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        wanted = world/name/('pruned' if what == 'report' else 'metrics.jsonl')
        while not wanted.exists() and job.poll() is None: time.sleep(.005)
        time.sleep(0 if what == 'report' else rng.uniform(0, .4))
        job.send_signal(sig)
        _, err = job.communicate(timeout=60)
        return job.returncode, err
    with ThreadPoolExecutor(2) as pool:
        whole = {what: pool.submit(subprocess.run, shell(*options(what), '--run-dir', f'whole-{what}'), env=env, capture_output=True) for what in ('training', 'evaluation')}
        results = [pool.submit(one, i) for i in range(len(cases))]
    for i, ((what, sig), result) in enumerate(zip(cases, results)):
        status, err = result.result()
        assert status == 128 + sig and err == f'allatt-prune: stopped by {sig.name}; --resume goes on with what was begun\n', (what, err)
        cli.run(cli.stored_recipe(f'signal{i}'), run_dir=f'signal{i}', device='cpu', resume=True)
        assert same(world/f'signal{i}', world/('whole-evaluation' if what == 'evaluation' else 'whole-training')), (what, sig)

# ---- nothing that can run a stranger's code

def test_nothing_can_unpickle():
    banned = {'pickle', 'cPickle', 'dill', 'joblib', 'shelve', 'marshal', 'yaml'}
    seen, home = 0, Path(__file__).parents[1]
    sources = {file: file.read_text(encoding='utf-8') for file in (*home.glob('*.py'), *home.glob('allatt_prune/*.py'))}
    for file in home.glob('nbs/**/*.ipynb'):
        for i, cell in enumerate(json.loads(file.read_text(encoding='utf-8'))['cells']):
            if cell['cell_type'] == 'code': sources[file, i] = ''.join(line for line in cell['source'] if not line.startswith(('%', '!')))
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            names = [a.name for a in node.names] + [getattr(node, 'module', None) or ''] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not {n.split('.')[0] for n in names} & banned, (file, node.lineno)
            if not isinstance(node, ast.Call): continue
            seen += 1
            called = ast.unparse(node.func)
            assert called not in ('eval', 'exec', 'compile', '__import__', 'os.system', 'os.popen', 'torch.load', 'torch.save', 'np.load', 'yaml.load'), (file, node.lineno)
            assert not called.startswith(('pickle.', 'dist.')) or not called.endswith(('_object', '_object_list', 'loads', 'load')), (file, node.lineno)
            for k in node.keywords:
                value = getattr(k.value, 'value', None)
                assert (k.arg, value) not in (('weights_only', False), ('allow_pickle', True), ('shell', True)), (file, node.lineno)
    assert seen > 2000
