"What breaks a training: kills, signals, full disks, damaged files, numbers that are none."
import fcntl, hashlib, json, os, random, re, resource, shutil, signal, struct, subprocess, sys, termios, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest, torch
from filelock import FileLock
import allatt_prune
from allatt_prune.engine import checkpoint, resume
from allatt_prune.engine import run as running
from allatt_prune.engine.corpora import load_corpus
from allatt_prune.data import DataError
from allatt_prune.gates import HeadGates
from allatt_prune import LM
from allatt_prune.engine.processes import Signals
from allatt_prune.engine.resume import Stopped, read_log, train_run, write_metrics
from allatt_prune.engine.report import table
from allatt_prune.engine.run import MODELS, Way, run, way
from allatt_prune.config import get_recipe

signal.signal(signal.SIGINT, signal.default_int_handler) # a shell starts jobs in the background without it

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

def go(name, resume=False, models=MODELS, **changes):
    return run(get_recipe('tiny', **dict(SMALL, corpus='own.txt') | changes), run_dir=name, device='cpu', resume=resume, models=models)

def small(**changes): # recipe, text, and a function that makes the model
    recipe, text = get_recipe('tiny', **SMALL | changes, corpus='own.txt'), load_corpus('own.txt')
    return recipe, text, lambda: checkpoint.build(recipe.config(len(text.vocab)))

def after_steps(monkeypatch, look): # calls look(phase, steps done) after every step of a run
    def watched(*args, phase=None, **how): return train_run(*args, phase=phase, after=lambda t: look(phase, t), **how)
    monkeypatch.setattr(running, 'train_run', watched)

# ---- exact resume

class Crash(BaseException): "Ends the process as it is: nothing is saved on the way."

PLACES = dict(baseline=('baseline', 4), epoch_end=('baseline', 7), control=('control', 6), warm_up=('gated', 3), gating=('gated', 6),
              before_freezing=('gated', 8), after_freezing=('gated', 9), fine_tuning=('gated', 13), last_step=('gated', 14))

LAMB, TAUGHT = dict(optimizer='lamb'), dict(teacher=.5, prune_dropout=False)

@pytest.mark.parametrize('how,kinds', (('crash', {}), ('signal', LAMB), ('signal', TAUGHT)))
def test_resume_gives_the_same_bits(world, monkeypatch, how, kinds):
    kind = ''.join(kinds)
    go(whole := f'whole-{kind}-{how}', **kinds)
    for name, place in [*PLACES.items()][::4] if kinds else PLACES.items():
        def interrupt(phase, t):
            if (phase, t.step) != place: return
            if how == 'crash': raise Crash
            os.kill(os.getpid(), random.choice((signal.SIGTERM, signal.SIGINT)))
        with monkeypatch.context() as patch, pytest.raises((Stopped, Crash)):
            after_steps(patch, interrupt)
            go(f'{name}-{kind}-{how}', **kinds)
        there = world/f'{name}-{kind}-{how}'
        last = sorted((there/'checkpoints').glob(f'{place[0]}-*'))
        if how == 'signal': assert last[-1].name == f'{place[0]}-{place[1]:08d}'
        go(there.name, **kinds, resume=True)
        assert same(there, world/whole), name
        assert not [p for p in there.rglob('*') if '.tmp-' in p.name]

def test_interrupted_again_and_again(world, monkeypatch):
    go('whole')
    calls, ends = [], 0
    def every_third(phase, t):
        calls.append(t.step)
        if len(calls) % 3 == 0: os.kill(os.getpid(), signal.SIGTERM)
    after_steps(monkeypatch, every_third)
    while True:
        try: go('often', resume=ends > 0); break
        except Stopped: ends += 1
    assert ends >= 12 and same(world/'often', world/'whole')

@pytest.mark.parametrize('every,at', ((5, 1), (5, 2), (5, 4), (6, 2), (7, 3)))         # within a phase; at the end of the baseline, and of the gated model
def test_stopped_in_a_validation(world, monkeypatch, every, at):
    go(whole := f'validations-{every}', valid_every=every, resume=Path(f'validations-{every}').exists())
    evaluate, calls = resume.evaluate, []
    def told(*args, after, **how): # the signal comes after the first segment
        calls.append(1)
        if len(calls) != at: return evaluate(*args, after=after, **how)
        def first(n): os.kill(os.getpid(), signal.SIGTERM), after(n)
        return evaluate(*args, after=first, **how)
    monkeypatch.setattr(resume, 'evaluate', told)
    name = f'{whole}-{at}'
    with pytest.raises(Stopped): go(name, valid_every=every)
    phase = 'baseline' if at < 3 else 'gated'
    config, parts = checkpoint.newest(f'{name}/checkpoints', phase)                     # the step is done, its validation is not
    last = parts['log']['records'][-1]
    assert last['step'] == config['step'] == [0, 5, 10, 5, 10][at] if every == 5 else (12 if every == 6 else 14) and 'valid' not in last
    for _ in range(4):                                                                  # told again and again, when it is done again
        calls[:] = [1] * (at - 1)
        with pytest.raises(Stopped): go(name, valid_every=every, resume=True)
    go(name, valid_every=every, resume=True)
    assert same(world/name, world/whole)
    assert read_log(name)['records'] == read_log(whole)['records'] and [r for r in read_log(name)['records'] if 'valid' in r]

def test_which_signals_are_recorded(monkeypatch):
    mine, handler = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), lambda *_: None
    before = [signal.signal(s, handler) for s in mine]
    try:
        for s in mine:
            with pytest.raises(Stopped, match=s.name), Signals() as signals:
                for _ in range(3): os.kill(os.getpid(), s)                              # more than one changes nothing
                assert signals.came == s
                with pytest.raises(Stopped): signals.check()
            signal.signal(s, signal.SIG_IGN)                                            # as under nohup, or in the background of a shell
            with Signals() as signals: os.kill(os.getpid(), s)
            assert signals.came == 0 and signal.getsignal(s) == signal.SIG_IGN
            signal.signal(s, handler)
        seen = []
        def other():
            with Signals() as signals: seen.append((signals.came, *map(signal.getsignal, mine)))
        thread = threading.Thread(target=other)
        thread.start(), thread.join()
        assert seen == [(0, handler, handler, handler)]
        set_, get = [], signal.getsignal                                                # a handler of a C library, which Python cannot set again
        with monkeypatch.context() as patch:
            patch.setattr(signal, 'getsignal', lambda s: None if s == signal.SIGTERM else get(s))
            patch.setattr(signal, 'signal', lambda s, f: set_.append(s))
            with Signals(): pass
        assert {*set_} == {signal.SIGINT, signal.SIGHUP}
    finally:
        for s, f in zip(mine, before): signal.signal(s, f)

def test_a_run_in_a_thread(world):
    errors = []
    def work():
        try: go('thread')
        except BaseException as e: errors.append(e)
    thread = threading.Thread(target=work)
    thread.start(), thread.join()
    go('no-thread')
    assert not errors and same(world/'thread', world/'no-thread')

def test_the_terminal_goes_away(world): # SIGHUP, and nothing can be printed any more
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 100, 0, 0))
    def own(): # the terminal, and the signal
        fcntl.ioctl(0, termios.TIOCSCTTY, 0), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    options = [x for k, v in dict(SMALL, corpus='long.txt', steps=10**6, valid_every=0, save_every=0).items() for x in (f"--{k.replace('_', '-')}", str(v))]
    job = subprocess.Popen(shell(*options, '--run-dir', 'hung'), stdin=slave, stdout=slave, stderr=slave, env={k: v for k, v in os.environ.items() if k != 'TQDM_DISABLE'} | dict(OMP_NUM_THREADS='1'),
                           start_new_session=True, preexec_fn=own)
    os.close(slave)
    seen = b''
    while b' bits' not in seen: seen += os.read(master, 1000)                           # the bar is shown
    os.close(master)
    assert job.wait(timeout=60)
    step = checkpoint.newest('hung/checkpoints', 'baseline')[0]['step']
    assert 0 < step == read_log('hung')['records'][-1]['step']

def test_a_model_pruned_by_gates_brings_the_gated_one(world):
    assert [r['model'] for r in go('implied', models=('baseline', 'pruned'), gate_lr=.3, lam=.5)] == ['baseline', 'gated', 'pruned']

def test_the_text_must_be_the_same(world):
    (world/'changes.txt').write_text(RHYME * 10)
    go('changes', corpus='changes.txt', models=MODELS[:1])
    for other in (RHYME * 9 + RHYME[::-1], RHYME[::-1] + RHYME * 9):                    # another test split, another training split
        (world/'changes.txt').write_text(other)
        with pytest.raises(DataError, match='corpus=.*: not the text of the run in changes'): go('changes', corpus='changes.txt', resume=True)

def test_only_one_works_in_a_folder(world):
    go('busy', models=MODELS[:1])
    with FileLock('busy/.lock'):
        job = [sys.executable, '-m', 'allatt_prune', 'run', '--run-dir', 'busy', '--resume']
        done = subprocess.run(job, capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS='1'))
    assert done.returncode == 1 and done.stderr.count('error: ') == 1 and 'busy/.lock' in done.stderr

# ---- what people do to a run directory

def edited(world, name, change, of='done'): # a finished run, or one that was stopped, changed by `change(folder)`, and resumed
    if not (world/'done').exists(): go('done')
    if not (world/'stopped').exists(): # when the gates had been trained, but the model was not saved
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            def crash(*_, **__): raise Crash
            patch.setattr(running, 'remove_heads', crash)
            go('stopped')
        shutil.rmtree(world/'stopped'/'gated')
    shutil.copytree(world/of, world/name)
    change(world/name)
    return go(name, resume=True)

def flipped(data, rng):
    bit = rng.randrange(8 * len(data))
    return data[:bit//8] + bytes([data[bit//8] ^ 1 << bit % 8]) + data[bit//8 + 1:]

@pytest.mark.parametrize('file', ('recipe.json', 'corpus.json'))
def test_no_bit_of_a_run_s_beginning_can_change(world, file):
    edited(world, f'flip-{file}', lambda folder: None, 'stopped')                                      # finished again; nothing is trained below
    path, rng = world/f'flip-{file}'/file, random.Random(file)
    data = path.read_bytes()
    for _ in range(20):
        path.write_bytes(flipped(data, rng))
        with pytest.raises(OSError, match=f'flip-{file}: {file} is damaged'): go(f'flip-{file}', resume=True)
    path.write_bytes(data)
    assert go(f'flip-{file}', resume=True) and same(world/f'flip-{file}', world/'done')

@pytest.mark.parametrize('what', ('finished', 'unfinished', 'lost'))
def test_damaged_records_are_mended(world, what):
    def damage(folder):
        lines = (folder/'metrics.jsonl').read_text().splitlines(keepends=True)
        wrong = lines[:-5] + lines[-4:] if what == 'lost' else ['rubbish\n', *lines]
        (folder/'metrics.jsonl').write_text(''.join(wrong))
    edited(world, f'records-{what}', damage, 'done' if what == 'finished' else 'stopped')
    assert same(world/f'records-{what}', world/'done')

def test_no_bit_of_a_record_of_a_finished_run_can_change(world):
    if not (world/'done').exists(): go('done')
    shutil.copytree(world/'done', world/'bits')
    file, rng = world/'bits'/'metrics.jsonl', random.Random(0)
    data = file.read_bytes()
    for i in range(20):
        file.write_bytes(flipped(data, rng) if i % 2 else data[:rng.randrange(len(data))])
        with pytest.raises(OSError, match='bits.*is damaged'): checkpoint.verify('bits')
        write_metrics('bits', read_log('bits')['records'])
        assert file.read_bytes() == data

@pytest.mark.parametrize('file', ('report.md', 'report.json'))
def test_no_bit_of_a_report_can_change(world, file):
    name = f'report-{file}'
    def damage(folder): (folder/file).write_bytes(flipped((folder/file).read_bytes(), random.Random(file)))
    rows = edited(world, name, damage)                                                  # made again
    checkpoint.verify(world/name)
    assert table(rows) in (world/name/'report.md').read_text() and json.loads((world/name/'report.json').read_text())['rows'] == rows
    (world/name/file).write_bytes(b'')
    if file == 'report.json':
        with pytest.raises(OSError, match='report.json is damaged'): checkpoint.verify(name)

def test_planted_links_are_not_followed(world):
    (world/'outside').mkdir()
    names = 'report.md', 'report.json', 'report.json.new', 'metrics.new', 'metrics.jsonl'
    def plant(folder):
        for n in names:
            (world/'outside'/n).write_text('precious')
            (folder/n).unlink(missing_ok=True)
            (folder/n).symlink_to(world/'outside'/n)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        edited(world, 'planted', plant, 'stopped')
    assert {p.read_text() for p in (world/'outside').iterdir()} == {'precious'} and len(names) == len([*(world/'outside').iterdir()])
    assert same(world/'planted', world/'done') and not [p for p in (world/'planted').iterdir() if p.is_symlink() and not p.name.endswith('.new')]
    (world/'fresh').mkdir()
    (world/'fresh'/'metrics.jsonl').symlink_to(world/'outside'/'new')                   # a training of its own, without a run
    recipe, text, make = small()
    train_run(make(), text, recipe, run_dir='fresh')
    assert not (world/'outside'/'new').exists() and not (world/'fresh'/'metrics.jsonl').is_symlink()

def everything(folder): return {str(p): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None for p in folder.rglob('*')}

@pytest.mark.parametrize('what', ('.lock', 'checkpoints', *MODELS, 'metrics.jsonl', 'report.md', 'manifest.json', 'recipe.json', 'corpus.json'))
@pytest.mark.parametrize('there', (True, False))
def test_a_stranger_s_run_writes_only_in_its_folder(world, what, there): # each of its parts as a link, to the real one or to nothing
    name = f'stranger-{what}-{there}'
    (world/'elsewhere'/name).mkdir(parents=True)
    def plant(folder):
        if (folder/what).exists() and there: (folder/what).rename(world/'elsewhere'/name/what)
        elif (folder/what).is_dir(): shutil.rmtree(folder/what)
        else: (folder/what).unlink(missing_ok=True)
        if what == '.lock' and there: (world/'elsewhere'/name/what).write_text('precious')
        (folder/what).symlink_to(world/'elsewhere'/name/what)
        plant.before = everything(world/'elsewhere')
    try: edited(world, name, plant, 'stopped')
    except OSError as e: assert '\n' not in str(e) and name in str(e)
    assert everything(world/'elsewhere') == plant.before and plant.before.keys() >= {str(world/'elsewhere'/name)}

def test_records_behind_a_link_are_not_copied(world):
    (world/'secret.jsonl').write_text('{"phase": "secret", "step": 1}\n')
    (world/'linked').mkdir(), (world/'linked'/'metrics.jsonl').symlink_to(world/'secret.jsonl')
    recipe, text, make = small()
    train_run(make(), text, recipe, run_dir='linked')
    assert {r['phase'] for r in read_log('linked')['records']} == {'baseline'} and 'secret' not in (world/'linked'/'metrics.jsonl').read_text()

def test_a_model_with_outside_names_is_not_pruned(world):
    if not (world/'done').exists(): go('done')
    shutil.copytree(world/'done'/'baseline', world/'evil')
    (world/'kept.json').write_text('{}')
    manifest = json.loads((world/'evil'/'manifest.json').read_text())
    manifest['files'][f'{world}/kept.json'] = hashlib.sha256(b'{}').hexdigest()
    (world/'evil'/'manifest.json').write_text(json.dumps(manifest))
    before = everything(world)
    with pytest.raises(OSError, match='evil: manifest.json is damaged'): run(get_recipe('tiny', **SMALL, corpus='own.txt'), run_dir='evil-run', device='cpu', baseline='evil')
    assert everything(world) == before

def resealed(folder, file, value): # with the right hash
    (folder/file).write_text(json.dumps(value))
    checkpoint.seal(folder, [p.name for p in folder.iterdir() if p.is_file() and p.name not in ('manifest.json', '.lock')])

@pytest.mark.parametrize('value', ([], 'x', None, 3, [1, 2], dict(unknown=1), dict(steps='x'), dict(steps=None), dict(n_head=[]), dict(heads=5)))
def test_a_recipe_of_another_type_is_refused_in_one_line(world, value):
    if not (world/'done').exists(): go('done')
    folder = world/'typed'
    shutil.rmtree(folder, ignore_errors=True), shutil.copytree(world/'done', folder)
    resealed(folder, 'recipe.json', value)
    with pytest.raises((OSError, ValueError)) as e: running.stored_recipe(folder)
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('file,value', [('log.json', x) for x in ([], 'x', None, {}, dict(records=5), dict(records={}, seconds={}), dict(records=[1], seconds={}), dict(records=[{}], seconds={}),
    dict(records=[], seconds=[]), dict(records=[], seconds=dict(gated='x')))] + [('config.json', x) for x in ([], 'x', None, {}, 3)] + [('optimizer0.json', [1]), ('mems.json', [1])])
def test_a_checkpoint_of_another_type_is_refused_in_one_line(world, file, value):
    recipe, text, make = small()
    folder = world/'odd'
    if not folder.exists(): train_run(make(), text, recipe, HeadGates(2, 4), folder)
    there = world/'odd-now'
    shutil.rmtree(there, ignore_errors=True), shutil.copytree(folder, there)
    newest = checkpoint.saved_steps(there/'checkpoints', 'gated')[-1]
    if file in ('optimizer0.json', 'mems.json'): (newest/file).with_suffix('.safetensors').unlink()
    resealed(newest, file, value)
    with pytest.raises(OSError) as e: train_run(make(), text, recipe, HeadGates(2, 4), there, resume=True)
    assert '\n' not in str(e.value) and len(str(e.value)) < 500

@pytest.mark.parametrize('line', ('rubbish', '5', '{}', '[' * 10_000, '\xff'))
def test_records_that_are_none_are_refused_in_one_line(world, line):
    recipe, text, make = small()
    (world/'lines').mkdir(exist_ok=True)
    (world/'lines'/'metrics.jsonl').write_bytes(line.encode('latin-1'))
    with pytest.raises(OSError, match='is damaged') as e: train_run(make(), text, recipe, run_dir='lines')
    assert '\n' not in str(e.value)

def test_a_finished_run_is_only_read(world):
    rows, before = go('read'), None
    (world/'read'/'.lock').unlink()
    before = everything(world/'read')
    for p in (world/'read').rglob('*'): os.chmod(p, p.stat().st_mode & ~0o222)
    with FileLock('read.lock'): assert go('read', resume=True) == rows                  # and nobody has to be waited for
    assert everything(world/'read') == before

def test_a_finished_run_is_small_and_can_get_another_model(world):
    if not (world/'done').exists(): go('done')
    go('extended', models=MODELS[:3])
    assert [p.name for p in (world/'extended'/'checkpoints').iterdir()] == ['finished-00000026']   # no weights, no optimizer
    go('extended', resume=True)                                                         # the control, too
    assert same(world/'extended', world/'done') and [*read_log('extended')['seconds']] == ['baseline', 'gated', 'control']
    assert [p.name for p in (world/'extended'/'checkpoints').iterdir()] == ['finished-00000040']

def test_a_resumed_run_makes_all_models_that_it_was_to_make(world, monkeypatch):
    if not (world/'done').exists(): go('done')
    with monkeypatch.context() as patch, pytest.raises(Stopped, match='stopped by SIGTERM') as e:
        after_steps(patch, lambda phase, t: os.kill(os.getpid(), signal.SIGTERM) if phase == 'gated' and t.step == 5 else None)
        go('remembers')
    assert 'resume=True' in str(e.value)
    rows = go('remembers', resume=True, models=MODELS[:1])
    assert [r['model'] for r in rows] == [*MODELS] and same(world/'remembers', world/'done')
    with pytest.raises(ValueError, match='remembers: a run; give one of its models, as remembers/pruned'): LM.from_pretrained('remembers')

def test_a_file_system_without_locks(world, monkeypatch):
    def flock(*_): raise OSError(37, 'No locks available')
    model = small()[2]()
    monkeypatch.setattr(fcntl, 'flock', flock)
    model.save_pretrained('no-locks-model')
    checkpoint.verify('no-locks-model')
    with pytest.raises(OSError, match='run_dir=no-locks: cannot take no-locks/.lock .*No locks available'): go('no-locks')

def test_a_model_that_was_lost_is_made_again(world):
    edited(world, 'lost', lambda folder: shutil.rmtree(folder/'pruned'))
    assert same(world/'lost', world/'done')
    with pytest.raises(OSError, match='lost2/baseline: model.safetensors is damaged'): edited(world, 'lost2', lambda folder: (folder/'baseline'/'model.safetensors').write_text('xx'))
    with pytest.raises(FileNotFoundError, match='lost3: corpus.json is missing'): edited(world, 'lost3', lambda folder: (folder/'corpus.json').unlink())

class Below(HeadGates): # whose numbers mean something else than those of `HeadGates`
    "Open where pi is below its mean."
    def open_mask(self): return self.log_alpha.detach() < self.log_alpha.detach().mean()

def below(recipe): return Way(Below(recipe.n_layer, recipe.n_head, scale=False))

@pytest.mark.parametrize('way,asked', ((below, {}), (way, {}), (way, dict(sparsity=.5))))
def test_gates_come_back_as_what_they_were(world, way, asked):
    name, recipe = '-'.join(['class', way.__name__, *asked]), get_recipe('tiny', **SMALL | asked, corpus='own.txt')
    def go(**kwargs): return [{k: x for k, x in r.items() if k not in ('ms', 'spread')}
                              for r in run(recipe, run_dir=name, device='cpu', **kwargs)]
    def kill(): # as if after gated/
        shutil.rmtree(f'{name}/pruned'), Path(f'{name}/report.json').unlink()
    rows = go(way=way)
    whole = {p: p.read_bytes() for p in Path(name, 'pruned').iterdir() if p.name in ('model.safetensors', 'keep.json')}
    z = checkpoint.load(f'{name}/gated')[1]['z']['z']
    assert len(whole) == 2 and 0 < (z > 0).sum() < 8
    kill()
    assert go(way=way, resume=True) == rows and whole == {p: p.read_bytes() for p in whole}
    kill() # the multipliers that were saved with the model count, not those of other gates
    assert go(resume=True) == rows and whole == {p: p.read_bytes() for p in whole}

def test_another_start_is_another_training(world):
    recipe, text, make = small()
    train_run(make(), text, recipe, run_dir='start')
    with pytest.raises(DataError, match='not the start, of'): train_run(make(), text, recipe, run_dir='start', start=3, resume=True)

def test_records_whose_checkpoints_are_gone_are_made_again(world):
    recipe, text, make = small()
    def trained(**more):
        torch.manual_seed(0)
        return train_run(make(), text, recipe, run_dir=world/'gone', **more)
    first = trained()
    shutil.rmtree(world/'gone'/'checkpoints')
    assert trained(resume=True) == first == read_log(world/'gone')['records']

# ---- numbers that are none

@pytest.mark.parametrize('what', ('loss', 'gradient', 'gate gradient'))
@pytest.mark.parametrize('value,dtype', ((float('nan'), 'float32'), (float('inf'), 'bfloat16')))
def test_stops_before_the_optimizer_moves(world, monkeypatch, what, value, dtype):
    adam, moved, name = torch.optim.AdamW.step, [], f'{what}-{value}-{dtype}'.replace(' ', '-')
    monkeypatch.setattr(torch.optim.AdamW, 'step', lambda self, *a: (moved.append(1), adam(self, *a))[1])
    recipe, text, make = small(dtype=dtype)
    model, gates = make(), allatt_prune.gates.HeadGates(2, 4)
    poison = lambda x: x * value if len(moved) == 6 else x                              # in the seventh step
    def text_loss(model, x, y, mems, z):
        loss, mems = model(x, y, mems, z)
        return poison(loss), mems
    how = dict(text_loss=text_loss) if what == 'loss' else {}
    if what != 'loss': (model.pos if what == 'gradient' else gates.log_alpha).register_hook(poison)
    with pytest.raises(FloatingPointError, match=r'loss=\S+: diverged at step 6, gradient norm \S+; give a smaller'):
        train_run(model, text, recipe, gates, world/name, **how)
    assert len(moved) == 6
    config, parts = checkpoint.newest(world/name/'checkpoints', 'gated')
    assert config['step'] == 4 and all(x.isfinite().all() for part in parts.values() for x in (part.values() if isinstance(part, dict) else ()) if torch.is_tensor(x))

# ---- damaged files

@pytest.fixture(scope='module')
def saved(world):
    recipe, text, make = small()
    train_run(make(), text, recipe, HeadGates(2, 4), 'damage')
    return world/'damage'/'checkpoints'

@pytest.mark.parametrize('how', ('cut', 'flip'))
def test_damage_is_refused_by_name(world, saved, how):
    rng, newest = random.Random(how), sorted(saved.glob('gated-*'))[-1]
    files = sorted(newest.iterdir())
    assert len(files) == 10 and len(sorted(saved.glob('gated-*'))) == 2
    older = checkpoint.load(sorted(saved.glob('gated-*'))[0])[0]['step']
    for i in range(60):
        file = files[i % len(files)]
        data = file.read_bytes()
        bit = rng.randrange(8 * len(data))
        file.write_bytes(data[:bit // 8] if how == 'cut' else data[:bit//8] + bytes([data[bit//8] ^ 1 << bit % 8]) + data[bit//8 + 1:])
        with pytest.raises(OSError, match=str(newest)): checkpoint.load(newest)
        with pytest.raises(OSError, match=str(newest)): checkpoint.newest(saved, 'gated')
        file.write_bytes(data)
    assert checkpoint.newest(saved, 'gated')[0]['step'] > older
    newest.rename(world/'away')                                                         # without it, the one before is the newest
    assert checkpoint.newest(saved, 'gated')[0]['step'] == older
    (world/'away').rename(newest)

# ---- killed while saving; a full disk

SAVER = '''
import os, random, signal, sys, time, torch
from pathlib import Path
from allatt_prune.engine import checkpoint
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
    config, parts = checkpoint.newest(folder, 'x')                                     # and no error: none that has a name is damaged
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
    go('full', models=MODELS[:1], steps=4)                                          # a run of which only the baseline is there
    good = {p: p.read_bytes() for p in (world/'full').rglob('*') if p.is_file()}
    limit = 50_000
    done = subprocess.run([sys.executable, '-m', 'allatt_prune', 'run', '--run-dir', 'full', '--resume'], capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    *_, line = done.stderr.strip().splitlines()
    assert done.returncode == 1 and line == 'allatt-prune: error: [Errno 27] File too large', done.stderr
    assert all(p.read_bytes() == data for p, data in good.items() if p.name not in ('metrics.jsonl', 'plan.json', '.lock') and p != world/'full'/'manifest.json')
    checkpoint.verify(world/'full')                                                     # its manifest has let go of the report, which will be another
    assert sorted(p.name for p in (world/'full'/'checkpoints').iterdir()) == ['finished-00000004']
    go('full', steps=4, resume=True)                                                    # room was made
    go('full-whole', steps=4)
    assert same(world/'full', world/'full-whole')

# ---- real signals to the real command

def shell(*args): return [sys.executable, '-m', 'allatt_prune', 'run', *args]
def test_what_is_not_finite_is_not_saved(world):
    recipe, text, make = small(save_every=1)
    def poison(t):
        if t.step == 2: t.model.pos.data[0, 0] = float('inf')
    with pytest.raises(FloatingPointError, match='baseline: not finite before step 2'):
        train_run(make(), text, recipe, run_dir='finite', after=poison)
    assert checkpoint.newest('finite/checkpoints', 'baseline')[0]['step'] == 1

def test_a_text_without_held_out_part_is_refused_first(world):
    (world/'held').mkdir()
    for name, text in (('train', RHYME * 50), ('valid', 'a'), ('test', RHYME)): (world/'held'/f'{name}.txt').write_text(text)
    with pytest.raises(ValueError, match='valid 1, .* give more text'): run(small()[0], 'held', run_dir='none', device='cpu')
    assert not Path('none').exists()

def test_real_signals(world):
    busy = dict(training=dict(save_every=10, valid_every=0), evaluation=dict(save_every=10, valid_every=1), saving=dict(save_every=1, valid_every=0))
    common = dict(SMALL, steps=40, prune_steps=40, gate_steps=20)
    env = os.environ | dict(OMP_NUM_THREADS='1')
    def options(what): return [x for k, v in {**common, **busy[what], 'corpus': 'long.txt'}.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    term, ctrl_c = signal.SIGTERM, signal.SIGINT
    cases = [('training', term), ('training', ctrl_c), ('evaluation', term), ('saving', ctrl_c), ('report', term)]
    def one(i):
        (what, sig), name, rng = cases[i], f'signal{i}', random.Random(i)
        job = subprocess.Popen(shell(*options('training' if what == 'report' else what), '--run-dir', name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        wanted = world/name/(running.MODELS[-1] if what == 'report' else 'metrics.jsonl')
        while not wanted.exists() and job.poll() is None: time.sleep(.005)
        time.sleep(0 if what == 'report' else rng.uniform(0, .4))
        job.send_signal(sig)
        _, err = job.communicate(timeout=60)
        return job.returncode, err
    with ThreadPoolExecutor(2) as pool:
        whole = {what: pool.submit(subprocess.run, shell(*options(what), '--run-dir', f'whole-{what}'), env=env, capture_output=True) for what in ('training', 'evaluation')}
        results = [pool.submit(one, i) for i in range(len(cases))]
    seen = []
    for i, ((what, sig), result) in enumerate(zip(cases, results)):
        status, err = result.result()
        last, end = err.splitlines()[-1], f'; to continue: allatt-prune run --resume --run-dir signal{i}'
        named = status == 128 + sig and last == f'allatt-prune: stopped by {sig.name}{end}'
        told = named or (status, sig, last) == (130, signal.SIGINT, f'allatt-prune: stopped{end}') # Ctrl-C between two phases
        assert told or (status, sig) == (-signal.SIGTERM, signal.SIGTERM), (what, status, err)  # outside training, SIGTERM simply ends the process
        assert not [line for line in err.splitlines()[:-1 if told else None] if not line.endswith((' left', ': read as char', 'give 2,000 or more', ' on a CPU'))], err
        seen.append((what == 'report', named))
        run(running.stored_recipe(f'signal{i}'), run_dir=f'signal{i}', device='cpu', resume=True)
        assert same(world/f'signal{i}', world/('whole-evaluation' if what == 'evaluation' else 'whole-training')), (what, sig)
    assert (True, False) in seen and seen.count((False, True)) > len(cases)//2, seen

# ---- nothing that can run a stranger's code

def test_nothing_can_unpickle():
    banned = re.compile(r'\bpickle|\bdill\b|(?<!safetensors\.)\btorch\.(load|save)\(|np\.load\(|allow_pickle|(?<![.\w])(eval|exec)\(|shell=True|_object(_list)?\(')
    for file in Path(allatt_prune.__file__).parent.rglob('*.py'):
        found = [line for line in file.read_text(encoding='utf-8').splitlines() if banned.search(line.split('#')[0])]
        assert not found, (file, found)
