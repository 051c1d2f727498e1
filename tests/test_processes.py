"Several processes are one training: the same weights, one writer, one end."
import json, math, os, signal, subprocess, sys, time
from pathlib import Path
import pytest, torch, torch.distributed as dist, torch.multiprocessing as mp
from allatt_prune.engine import checkpoint
from allatt_prune.data import Corpus
from allatt_prune.gates import HeadGates
from allatt_prune.engine.checkpoint import build
from allatt_prune import LM
from allatt_prune.engine import resume
from allatt_prune.engine.resume import Stopped, train_run
from allatt_prune.config import get_recipe

SMALL = dict(n_layer=2, d_model=32, n_head=4, n_persistent=16, seg_len=16, mem_len=16, batch=4, log_every=1, save_every=0, valid_every=0,
             steps=20, warmup=2, prune_steps=20, prune_warmup=2, lam_warmup=4, gate_steps=12, gate_lr=.1, lam=.3, eval_tokens=400)
RHYME = 'one two buckle my shoe three four knock at the door '

def make(dtype, optimizer='adamw', **changes): # a model, gates and a text whose end comes within 20 steps
    torch.manual_seed(0)
    recipe = get_recipe('tiny', **SMALL | changes, optimizer=optimizer)
    ids = torch.randint(40, (1700,)).numpy()
    corpus = Corpus('numbers', ids[:1000], ids[1000:1500], ids[1500:], [str(i) for i in range(40)], 'char')
    return build(recipe.config(40)).to(dtype), corpus, recipe, HeadGates(2, 4).to(dtype)

def state(model, gates): return {**model.state_dict(), **gates.state_dict()}

CASES = dict(double=(torch.float64, 'adamw', {}), double_lamb=(torch.float64, 'lamb', {}), single=(torch.float32, 'adamw', {}), words=(torch.float64, 'adamw', dict(cutoffs=(10, 20), valid_every=7)),
             xl=(torch.float64, 'adamw', dict(n_persistent=0, d_ff=32)))

def join(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=world)

def stopping(yes): # what to do after each step: at step 14 comes SIGTERM
    def after(t):
        if t.step == 14 and yes: os.kill(os.getpid(), signal.SIGTERM)
    return after

def of_process(rank, world, folder):
    join(rank, world, folder)
    for name, (dtype, optimizer, changes) in CASES.items():
        model, corpus, recipe, gates = make(dtype, optimizer, **changes)
        noise, seen = [], []
        draw, forward = gates.forward, model.forward
        gates.forward = lambda: (noise.append(draw()), noise[-1])[1]
        model.forward = lambda ids, *args: (seen.append(ids[:, 0].tolist()) if model.training else 0, forward(ids, *args))[1]
        records = train_run(model, corpus, recipe, gates, f'{folder}/{name}')
        checkpoint.save(f'{folder}/{name}-{rank}', dict(records=records, seen=seen, seed=torch.initial_seed()), state=state(model, gates), noise=dict(noise=torch.stack(noise)))
    model, corpus, recipe, gates = make(torch.float64)                                # begun by one process, ended by two
    train_run(model, corpus, recipe, gates, f'{folder}/grown', resume=True)
    checkpoint.save(f'{folder}/grown-{rank}', {}, state=state(model, gates))
    model, corpus, recipe, gates = make(torch.float64)                                # begun by two; only one of them is told to stop
    with pytest.raises(Stopped): train_run(model, corpus, recipe, gates, f'{folder}/shrunk', after=stopping(rank == 1))
    evaluate = resume.evaluate
    for told in (0, 1):                                                               # only one of them is told, in a validation; then both go on
        def validates(*args, **how):
            if rank == told: os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(*args, **how)
        model, corpus, recipe, gates = make(torch.float64, valid_every=7)
        resume.evaluate = validates
        with pytest.raises(Stopped): train_run(model, corpus, recipe, gates, f'{folder}/told{told}')
        with pytest.raises(Stopped): train_run(model, corpus, recipe, gates, f'{folder}/told{told}', resume=True) # at 14, or again at 7
        resume.evaluate = evaluate
        model, corpus, recipe, gates = make(torch.float64, valid_every=7)
        records = train_run(model, corpus, recipe, gates, f'{folder}/told{told}', resume=True)
        checkpoint.save(f'{folder}/told{told}-{rank}', dict(records=records), state=state(model, gates))
    model, corpus, recipe, gates = make(torch.float64, dropout=.1)                   # NaN in one process only
    forward = LM.forward
    def poisoned(self, *args):
        loss, mems = forward(self, *args)
        poisoned.calls += 1
        return (loss * math.nan if rank == 1 and poisoned.calls == 7 else loss), mems
    poisoned.calls, LM.forward = 0, poisoned
    try: train_run(model, corpus, recipe, gates, f'{folder}/nan')
    except FloatingPointError as e: Path(f'{folder}/nan-{rank}').write_text(str(e))
    LM.forward = forward
    dist.destroy_process_group()

@pytest.fixture(scope='module')
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp('two')
    model, corpus, recipe, gates = make(torch.float64)
    with pytest.raises(Stopped): train_run(model, corpus, recipe, gates, folder/'grown', after=stopping(True))
    mp.spawn(of_process, (2, str(folder)), nprocs=2)
    return folder

@pytest.mark.parametrize('case', CASES)
def test_two_processes_are_one(two, case):
    dtype, optimizer, changes = CASES[case]
    model, corpus, recipe, gates = make(dtype, optimizer, **changes)
    noise, draw = [], gates.forward
    gates.forward = lambda: (noise.append(draw()), noise[-1])[1]
    records = train_run(model, corpus, recipe, gates)
    one, (a, b) = state(model, gates), (checkpoint.load(two/f'{case}-{rank}') for rank in (0, 1))
    for k in one:
        assert torch.equal(a[1]['state'][k], b[1]['state'][k]), k                       # on both the same bits
        if dtype == torch.float64: torch.testing.assert_close(a[1]['state'][k], one[k], rtol=0, atol=1e-12)
    assert all(len(x) == len(y) == 2 for x, y in zip(a[0]['seen'], b[0]['seen'])) and a[0]['seen'] != b[0]['seen']  # each its own streams
    assert a[0]['seed'] != b[0]['seed']                                                 # each drops out what it will
    assert torch.equal(a[1]['noise']['noise'], b[1]['noise']['noise']) and len(noise) >= 20
    if dtype == torch.float64: assert (a[1]['noise']['noise'] - torch.stack(noise)).abs().max() == 0
    assert one['log_alpha'].std() > .01 and (torch.stack(noise) == 0).any()             # the gates did move, and did close by chance
    for mine, theirs, others in zip(records, a[0]['records'], b[0]['records']):
        assert abs(mine['loss'] - theirs['loss']) <= 1e-5 and theirs['loss'] == others['loss']
        assert abs(mine.get('valid', 0) - theirs.get('valid', 0)) < 1e-10
    assert [json.loads(line)['step'] for line in (two/case/'metrics.jsonl').read_text().splitlines()] == list(range(1, 21)) # written once

def test_begun_by_one_ended_by_two_and_the_reverse(two):
    model, corpus, recipe, gates = make(torch.float64)
    train_run(model, corpus, recipe, gates)
    other, _, _, others = make(torch.float64)
    assert checkpoint.newest(two/'shrunk'/'checkpoints', 'gated')[0]['step'] == 14
    train_run(other, corpus, recipe, others, two/'shrunk', resume=True)
    torch.testing.assert_close(state(other, others), state(model, gates), rtol=0, atol=1e-12)
    for rank in (0, 1): torch.testing.assert_close(checkpoint.load(two/f'grown-{rank}')[1]['state'], state(model, gates), rtol=0, atol=1e-12)

@pytest.mark.parametrize('told', (0, 1))
def test_one_is_told_in_a_validation(two, told):
    model, corpus, recipe, gates = make(torch.float64, valid_every=7)
    records = train_run(model, corpus, recipe, gates)
    for rank in (0, 1):
        config, parts = checkpoint.load(two/f'told{told}-{rank}')
        torch.testing.assert_close(parts['state'], state(model, gates), rtol=0, atol=1e-12)
        assert [[r['step'], 'valid' in r] for r in config['records']] == [[i, i % 7 == 0] for i in range(1, 21)]
        assert all(abs(a.get('valid', 0) - b.get('valid', 0)) < 1e-10 for a, b in zip(config['records'], records))

def test_nan_in_one_stops_all(two):
    for rank in (0, 1): assert 'diverged at step 6, gradient norm nan' in (two/f'nan-{rank}').read_text()

# ---- the real launcher

def torchrun(folder, *args, n=2): return subprocess.Popen([sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', str(n), *args],
    cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | dict(ALLATT_PRUNE_CACHE=str(folder/'cache'), OMP_NUM_THREADS='1'))

@pytest.fixture
def folder(tmp_path):
    (tmp_path/'own.txt').write_text(RHYME * 60)
    return tmp_path

OPTIONS = [x for k, v in dict(SMALL, corpus='own.txt', dropout=.1).items() for x in (f"--{k.replace('_', '-')}", str(v))]

def test_sigterm_to_torchrun_saves_and_one_process_goes_on(folder):
    job = torchrun(folder, '-m', 'allatt_prune', 'run', *OPTIONS, '--steps', '5000', '--save-every', '5', '--run-dir', 'x')
    while not (folder/'x'/'metrics.jsonl').exists() and job.poll() is None: time.sleep(.01)
    time.sleep(.5)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0 and 'allatt-prune: stopped by SIGTERM' in err, err
    step = checkpoint.newest(folder/'x'/'checkpoints', 'baseline')[0]['step']
    assert json.loads((folder/'x'/'metrics.jsonl').read_text().splitlines()[-1])['step'] == step > 0
    again = subprocess.Popen([sys.executable, '-m', 'allatt_prune', 'train', '--run-dir', 'x', '--resume'], cwd=folder, stderr=subprocess.PIPE, text=True,
                             env=os.environ | dict(ALLATT_PRUNE_CACHE=str(folder/'cache'), OMP_NUM_THREADS='1'))
    while len((folder/'x'/'metrics.jsonl').read_text().splitlines()) < step + 5 and again.poll() is None: time.sleep(.01)
    again.send_signal(signal.SIGTERM)
    assert again.wait(timeout=60) == 143
    steps = [json.loads(line)['step'] for line in (folder/'x'/'metrics.jsonl').read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= step + 5                 # none twice, none left out

def test_run_on_two_processes(folder):
    job = torchrun(folder, '-m', 'allatt_prune', 'run', *OPTIONS, '--run-dir', 'x')
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0 and out.count('report: x/report.md') == 1, err
    assert len(json.loads((folder/'x'/'report.json').read_text())['rows']) == 4
    job = torchrun(folder, '-m', 'allatt_prune', 'prune', 'x/baseline', '--run-dir', 'p')
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0 and out.count('report: p/report.md') == 1, err

BREAKS = '''
import os
from allatt_prune.engine import cli, run
train_run = run.train_run
def after(t):
    if t.step == 3 and os.environ['RANK'] == '1': raise OSError('disk=b: gone; find it')
run.train_run = lambda *args, **how: train_run(*args, after=after, **how)
cli.main()
'''

def test_any_exception_ends_all(folder):
    (folder/'breaks.py').write_text(BREAKS)
    began = time.time()
    job = torchrun(folder, 'breaks.py', 'run', *OPTIONS, '--run-dir', 'x')
    _, err = job.communicate(timeout=120)
    assert job.returncode != 0 and 'allatt-prune: error: disk=b: gone; find it' in err and time.time() - began < 60, err
    assert 'cli.py' not in err                                                          # no traceback of ours
    assert not subprocess.run(['pgrep', '-f', str(folder)], capture_output=True, text=True).stdout

def test_a_batch_that_processes_cannot_share_is_refused(folder):
    job = torchrun(folder, '-m', 'allatt_prune', 'run', *OPTIONS, '--run-dir', 'x', '--batch', '3')
    _, err = job.communicate(timeout=120)
    assert job.returncode != 0 and 'allatt-prune: error: batch=3: cannot be divided by 2 processes' in err
    assert not (folder/'x').exists()
