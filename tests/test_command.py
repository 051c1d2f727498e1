"The real command, in its own process: what it refuses, what it leaves behind, how it ends."
import errno, json, math, os, pickle, re, shlex, shutil, signal, subprocess, sys, time
from dataclasses import asdict
from pathlib import Path
import pytest, torch
from allatt_prune.engine import checkpoint
from allatt_prune.engine.cli import main
from allatt_prune.gates import HeadGates
from allatt_prune.model import LM, LMConfig
from forks import command

TOY = ('--n-layer 2 --d-model 32 --n-head 4 --n-persistent 16 --seg-len 16 --mem-len 16 --batch 4 --log-every 5 --steps 12 --warmup 2 '
       '--prune-steps 12 --prune-warmup 2 --lam-warmup 2 --gate-steps 6 --gate-lr 0.3 --lam 0.5').split()
RHYME = 'one two buckle my shoe three four knock at the door '

@pytest.fixture(scope='session')
def cache(tmp_path_factory): return tmp_path_factory.mktemp('cache')

class Bomb: # what a malicious pickle does when it is opened
    def __reduce__(self): return os.system, ('touch exploded',)

def fill(folder): # texts, taken names, and saved models in every state of damage
    (folder/'own.txt').write_text(RHYME * 60)
    (folder/'short.txt').write_text(RHYME)
    (folder/'blank.txt').write_text(' \n')
    (folder/'latin.txt').write_bytes('café '.encode('latin-1') * 500)
    for name in ('taken', 'two words', 'größe', '-dash'):
        (folder/name).mkdir()
        (folder/name/'result').write_text('precious')
    torch.manual_seed(0)
    symbols = sorted(set(RHYME))
    cfg = LMConfig(vocab=len(symbols), n_layer=2, d_model=32, n_head=4, n_persistent=16, seg_len=16, mem_len=16)
    model, gates = LM(cfg).state_dict(), HeadGates(2, 4).state_dict()
    def save(name, **changes): checkpoint.save(folder/name, **dict(config=asdict(cfg), model=model, gates=gates, vocab=dict(unit='char', symbols=symbols)) | changes)
    save('good', config=asdict(cfg))
    save('other-words', vocab=dict(unit='char', symbols=symbols[:-1] + ['~']))
    save('other-shape', config=asdict(cfg) | dict(d_model=64))
    save('enormous', config=asdict(cfg) | dict(n_layer=10**9))
    save('not-a-number', model=model | {'layers.1.attn.pv': model['layers.1.attn.pv'] * math.nan})
    save('gates-nan', gates=gates | dict(log_alpha=torch.full((2, 4), math.nan)))
    save('gates-long', gates=gates | dict(log_alpha=torch.ones(3, 4)))
    save('gates-one-layer', gates=gates | dict(log_alpha=torch.tensor([[-1.] * 4, [1.] * 4])))
    save('gates-none', gates=gates | dict(log_alpha=torch.full((2, 4), -1.)))
    (folder/'empty.safetensors').write_bytes(b'')
    (folder/'notes.safetensors').write_text('buy milk\n')
    (folder/'page.html').write_text('<html>404</html>')
    (folder/'bomb.pt').write_bytes(pickle.dumps(Bomb()))
    for name, content in (('cut', lambda d: d[:-7]), ('flipped', lambda d: d[:500] + bytes([d[500] ^ 1]) + d[501:]), ('html', lambda d: b'<html>'), ('bomb', lambda d: pickle.dumps(Bomb()))):
        shutil.copytree(folder/'good', folder/name)
        file = folder/name/'model.safetensors'
        file.write_bytes(content(file.read_bytes()))
    shutil.copytree(folder/'bomb', folder/'bomb-with-papers')                         # its manifest is right
    manifest = folder/'bomb-with-papers'/'manifest.json'
    wrong, right = (checkpoint.hashlib.sha256((folder/f/'model.safetensors').read_bytes()).hexdigest() for f in ('good', 'bomb'))
    manifest.write_text(manifest.read_text().replace(wrong, right))
    shutil.copytree(folder/'good', folder/'newer')
    manifest = folder/'newer'/'manifest.json'
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    (folder/'broken-run').mkdir()
    (folder/'broken-run'/'recipe.json').write_text('{"steps": 1')
    return folder

@pytest.fixture
def folder(tmp_path, cache, monkeypatch):
    monkeypatch.setenv('ALLATT_PRUNE_CACHE', str(cache))
    return fill(tmp_path)

def state(folder): return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob('*')}

RUN, SCORE = ['run', *TOY], ['evaluate', '--corpus', 'own.txt']
OWN = [*RUN, '--corpus', 'own.txt']
REFUSED = [ # arguments, exit status, what the line must name
    ([], 2, 'command='), # flags
    (['fly'], 2, 'fly'),
    ([*RUN, 'surplus'], 2, 'surplus'),
    ([*RUN, '--steps'], 2, '--steps'),
    ([*OWN, '--device', 'abacus'], 2, 'device=abacus'),
    ([*SCORE], 2, 'model'),
    ([*SCORE, 'good', '--mem-len', '1000000000'], 1, 'memory='),
    ([*RUN, '--recipe', 'huge'], 2, 'recipe=huge'), # recipe
    ([*RUN, '--lamda', '0.2'], 2, 'did you mean --lam?'),
    ([*RUN, '--steps', '0'], 2, 'steps=0'),
    ([*RUN, '--steps', 'ten'], 2, 'steps=ten'),
    ([*RUN, '--lr', '-1'], 2, 'lr=-1'),
    ([*RUN, '--lr', 'nan'], 2, 'lr=nan'),
    ([*RUN, '--lam=-inf'], 2, 'lam=-inf'),
    ([*RUN, '--lam=-1e5'], 2, 'lam=-100000'),
    ([*RUN, '--n-head', '7'], 2, 'n_head=7'),
    ([*RUN, '--n-layer', '1000000000'], 2, 'n_layer=1000000000'),
    ([*RUN, '--dtype', 'float8'], 2, 'dtype=float8'),
    ([*OWN, '--cutoffs', '5'], 2, 'cutoffs=[5]'),
    ([*OWN, '--batch', '1000000000'], 1, 'corpus=own.txt'),
    ([*RUN, '--corpus', 'wikipedia'], 2, 'corpus=wikipedia'), # paths
    ([*RUN, '--corpus', 'no/such.txt'], 1, 'corpus=no/such.txt'),
    ([*RUN, '--corpus', 'blank.txt'], 1, 'corpus=blank.txt'),
    ([*RUN, '--corpus', 'latin.txt'], 1, 'byte 3'),
    ([*RUN, '--corpus', 'short.txt'], 1, 'corpus=short.txt'),
    ([*OWN, '--run-dir', 'taken'], 1, 'run_dir=taken'),
    ([*OWN, '--run-dir', 'two words'], 1, 'run_dir=two words'),
    ([*OWN, '--run-dir', 'größe'], 1, 'run_dir=größe'),
    ([*OWN, '--run-dir', '-dash'], 2, '--run-dir'),
    ([*OWN, '--run-dir=-dash'], 1, 'run_dir=-dash'),
    ([*OWN, '--run-dir', 'own.txt'], 1, 'run_dir=own.txt'),
    ([*OWN, '--run-dir', 'own.txt/below'], 1, 'run_dir=own.txt/below'),
    ([*OWN, '--run-dir', '/proc/here'], 1, 'run_dir=/proc/here'),
    ([*OWN, '--cache', 'own.txt/below'], 1, 'own.txt/below'),
    ([*SCORE, 'no/such'], 1, 'checkpoint=no/such: not found'), # checkpoints
    ([*SCORE, 'taken'], 1, 'checkpoint=taken: no manifest.json'),
    ([*SCORE, 'empty.safetensors'], 1, 'checkpoint=empty.safetensors: not a folder'),
    ([*SCORE, 'notes.safetensors'], 1, 'checkpoint=notes.safetensors: not a folder'),
    ([*SCORE, 'page.html'], 1, 'checkpoint=page.html: not a folder'),
    ([*SCORE, 'bomb.pt'], 1, 'checkpoint=bomb.pt: not a folder'),
    ([*SCORE, 'cut'], 1, 'checkpoint=cut: model.safetensors is damaged'),
    ([*SCORE, 'flipped'], 1, 'checkpoint=flipped: model.safetensors is damaged'),
    ([*SCORE, 'bomb'], 1, 'checkpoint=bomb: model.safetensors is damaged'),
    ([*SCORE, 'bomb-with-papers'], 1, 'model.safetensors is not safetensors'),
    ([*SCORE, 'newer'], 1, 'manifest.json is damaged, or of a newer allatt_prune'),
    ([*SCORE, 'other-words'], 1, "corpus=own.txt: the model does not know"),
    ([*SCORE, 'other-shape'], 1, 'size mismatch for pos'),
    ([*SCORE, 'enormous'], 1, 'n_layer=1000000000'),
    ([*SCORE, 'not-a-number'], 1, 'layers.1.attn.pv is not finite'),
    ([*SCORE, 'gates-nan'], 1, 'log_alpha is not finite'), # gates
    ([*SCORE, 'gates-long'], 1, 'size mismatch for log_alpha'),
    ([*OWN, '--run-dir', ''], 2, 'run_dir=: no name'), # names
    ([*OWN, '--run-dir', 'own.txt/x'], 1, 'run_dir=own.txt/x: '),
    ([*OWN, '--run-dir', '\x1b[31mred', '--device', '\x1b[2Jabacus'], 2, 'device=\\x1b[2Jabacus'),
    ([*RUN, '--corpus', '\x1b[31mred.txt'], 1, 'corpus=\\x1b[31mred.txt: no such file'),
    ([*OWN, '--cutoffs', ','.join(map(str, range(5000, 0, -1)))], 2, 'cutoffs='),
    (['score'], 2, 'model'), # scores
    (['score', 'no/such'], 1, 'checkpoint=no/such: not found'),
    (['score', 'good', '--corpus', 'own.txt', '--method', 'entrpy'], 2, 'method=entrpy: unknown; give entropy'),
    (['score', 'good', '--corpus', 'own.txt', '--sparsity', '1.5'], 2, 'sparsity=1.5: not a share'),
    (['score', 'good', '--corpus', 'own.txt', '--score-tokens', '20', '--method', 'entropy'], 2, 'score_tokens=20: 8 streams'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--method', 'glue'], 2, 'method=glue: unknown; give gates, subset, random, magnitude'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--method', 'subset'], 2, 'sparsity=0: method subset needs a share'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--method', 'random', '--repair', 'glue'], 2, 'repair=glue: unknown'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--repair', 'glue'], 2, 'repair=glue: only for heads that a score chooses'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--method', 'entropy', '--sparsity', '.5', '--score-tokens', '20'], 2, 'score_tokens=20: 8 streams need'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--sparsity', '.01'], 2, 'sparsity=0.01: no head would go'),
    (['sample', 'good', '--prompt', 'Ones'], 2, "prompt=Ones: good does not know 'O'; give text of"), # writing
    (['sample', 'good', '--n', '1.5'], 2, 'n=1.5: not int'),
    (['sample', 'good', '--temperature', '-1'], 2, 'temperature=-1.0: not a number from 0'),
    (['sample', 'good', '--top-k', '-1'], 2, 'top_k=-1: negative'),
    (['sample', 'taken'], 1, 'checkpoint=taken'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--sizes', '3,3'], 2, 'sizes=[3, 3]: not different numbers of 8 heads'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--sizes', '9,3'], 2, 'sizes=[3, 9]: not different numbers of 8 heads'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--sizes', '3', '--sparsity', '.5'], 2, 'sizes=[3]: they are for'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--sizes', '3', '--method', 'taylor'], 2, 'sizes=[3]: they are for'),
    (['prune'], 2, 'model='), # prune, resume
    (['prune', 'taken'], 1, 'checkpoint=taken'),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--run-dir', 'good/below'], 2, 'run_dir=good/below'),
    ([*OWN, '--run-dir', 'x' * 300], 1, 'File name too long'),
    ([*RUN, '--corpus', 'a\nb'], 2, 'corpus=a\\nb: '),
    (['prune', 'good', *TOY, '--corpus', 'own.txt', '--d-model', '64'], 2, 'd_model=64'),
    ([*OWN, '--run-dir', 'none', '--resume'], 1, 'run_dir=none: no manifest.json with recipe.json there, so no run'),
    ([*OWN, '--run-dir', 'broken-run', '--resume'], 1, 'run_dir=broken-run: no manifest.json with recipe.json there, so no run'),
]
name_of = lambda case: ascii(' '.join(a[:40] for a in case[0] if a not in TOY)) or 'nothing'

@pytest.fixture(scope='session')
def outcomes(tmp_path_factory, cache): # a process for each, with a folder of its own
    template = fill(tmp_path_factory.mktemp('template'))
    env = os.environ | dict(ALLATT_PRUNE_CACHE=str(cache), OMP_NUM_THREADS='1')
    command('download', str(template/'own.txt'), cwd=template, env=env)
    def attempt(i):
        here = tmp_path_factory.mktemp(f'case{i}')/'here'
        shutil.copytree(template, here)
        before = state(here)
        done = command(*REFUSED[i][0], cwd=here, env=env)
        return done, [f for f, x in state(here).items() if before.get(f, 0) != x] + [f for f in before if not (here/f).exists()]
    return [attempt(i) for i in range(len(REFUSED))]

@pytest.mark.parametrize('i', range(len(REFUSED)), ids=[name_of(c) for c in REFUSED])
def test_refused_in_one_line_and_nothing_written(outcomes, i):
    (words, status, named), (done, changed) = REFUSED[i], outcomes[i]
    option, rest = '--' + named.partition('=')[0].replace('_', '-'), ''.join(named.partition('=')[1:])
    if option in [word.partition('=')[0] for word in words]: named = option + rest                  # as it was typed
    lines = done.stderr.strip().splitlines()
    assert done.returncode == status, done.stderr
    assert len(lines) == 1 and lines[0].startswith('allatt-prune: error: ') and named in lines[0], done.stderr
    assert done.stdout == '' and not changed and len(lines[0]) < 700 and lines[0].isprintable()

def test_the_bomb_is_one(tmp_path): # or its silence above would mean nothing
    subprocess.run([sys.executable, '-c', f'import pickle; pickle.loads({pickle.dumps(Bomb())!r})'], cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(Path(__file__).parent)))
    assert (tmp_path/'exploded').exists()

@pytest.mark.parametrize('gates', ('gates-one-layer', 'gates-none'))
def test_closed_gates_are_no_error(folder, monkeypatch, capsys, gates):
    monkeypatch.chdir(folder)
    main([*SCORE, gates])
    assert re.fullmatch(r'valid of own.txt: \d\.\d+ nats.*\n', capsys.readouterr().out)

@pytest.mark.parametrize('lam', ('0', '100000'))
def test_a_lambda_that_removes_nothing_or_everything_is_a_warning(folder, lam):
    done = command(*OWN, '--lam', lam, '--run-dir', 'x', cwd=folder)
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if 'warning' in line]
    assert len(warned) == 1 and warned[0].startswith(f'allatt-prune: warning: lam={lam}: ') and 'report: x/report.md' in done.stdout

def test_paths_with_spaces_and_dashes(folder):
    shutil.copy(folder/'own.txt', folder/'mein größter text.txt')
    done = command(*RUN, '--corpus', 'mein größter text.txt', '--run-dir=-x y/ü', '--device', 'cpu', cwd=folder)
    assert done.returncode == 0 and 'report: -x y/ü/report.md' in done.stdout, done.stderr

def test_names_that_are_no_text_and_terminals_that_know_no_signs(folder):
    name = os.fsdecode(b'caf\xe9 \x1b[31m.txt')                                       # Latin-1, and a colour
    shutil.copy(folder/'own.txt', folder/name)
    for i, how in enumerate((dict(PYTHONIOENCODING='ascii', PYTHONUTF8='0', LC_ALL='C'), dict(PYTHONIOENCODING='utf-8'))):
        done = subprocess.run([sys.executable, '-m', 'allatt_prune', *RUN, '--corpus', name, '--run-dir', f'{i}\x1b[31m'], cwd=folder, capture_output=True, timeout=300, env=os.environ | how)
        assert done.returncode == 0, done.stderr
        assert b'\x1b' not in done.stdout + done.stderr and f'report: {i}\\x1b[31m/report.md'.encode() in done.stdout
        assert ('?' if i == 0 else '±') in done.stdout.decode('ascii' if i == 0 else 'utf-8')
        report = (folder/f'{i}\x1b[31m'/'report.md').read_text(encoding='utf-8')
        assert '\x1b' not in report and 'caf\\udce9' in report
    helps = subprocess.run([sys.executable, '-m', 'allatt_prune', 'run', '--help'], capture_output=True, timeout=300, env=os.environ | dict(PYTHONIOENCODING='ascii', PYTHONUTF8='0', LC_ALL='C'))
    assert helps.returncode == 0 and b'?' in helps.stdout                             # the sign for a section

def test_a_full_disk_without_a_name(monkeypatch, capsys):
    def full(*args, **how): raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr('allatt_prune.engine.cli.load_corpus', full)
    with pytest.raises(SystemExit) as end: main(['download', 'pydocs'])
    assert (end.value.code, capsys.readouterr().err) == (1, 'allatt-prune: error: system=ENOSPC: No space left on device; make room\n')

def test_ctrl_c_while_libraries_are_loaded(folder):
    (folder/'shim').mkdir()
    (folder/'shim'/'safetensors.py').write_text('import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n')
    path = f"{folder/'shim'}:{os.environ.get('PYTHONPATH', '')}"
    def heard(*command):                                                               # also where the tests themselves run in the background of a shell, which ignores Ctrl-C
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env=os.environ | dict(PYTHONPATH=path),
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    for args in ([sys.executable, '-m', 'allatt_prune'], [sys.executable, str(Path(sys.executable).with_name('allatt-prune'))]):
        done = heard(*args, 'download', 'own.txt')
        assert (done.returncode, done.stdout, done.stderr) == (130, '', 'allatt-prune: stopped by SIGINT\n')
    assert 'KeyboardInterrupt' in heard(sys.executable, '-c', 'from allatt_prune import LM').stderr # in somebody's program it is hers

def test_what_prune_copies(folder):
    (folder/'good'/'endless').symlink_to('/dev/zero')
    (folder/'good'/'notes.txt').write_text('mine')
    done = command('prune', 'good', *TOY, '--corpus', 'own.txt', '--run-dir', 'p', cwd=folder)
    assert done.returncode == 0, done.stderr
    kept = {f.name for f in (folder/'good').iterdir()} - {'endless', 'notes.txt'} | {'README.md'}   # the card is new
    assert {f.name for f in (folder/'p'/'baseline').iterdir()} == kept

def test_debug_shows_the_traceback(folder):
    done = command('run', '--recipe', 'huge', '--debug', cwd=folder)
    assert done.returncode != 0 and 'Traceback' in done.stderr

def test_run_twice_gives_the_same_files_and_never_overwrites(folder):
    for name in ('a', 'b'):
        done = command(*OWN, '--run-dir', name, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count('\n') == 10 and done.stdout.startswith('| | heads |') and done.stdout.endswith(f'report: {name}/report.md\n')
    for f in [*(f'{m}/model.safetensors' for m in ('baseline', 'control', 'gated', 'pruned')), 'metrics.jsonl']:
        assert (folder/'a'/f).read_bytes() == (folder/'b'/f).read_bytes()
    before = state(folder)
    assert command(*OWN, '--run-dir', 'a', cwd=folder).returncode == 1
    assert state(folder) == before
    strict = lambda text: json.loads(text, parse_constant=pytest.fail)        # no NaN or Infinity, which are not JSON
    assert strict((folder/'a'/'report.json').read_text())['rows'][2]['model'] == 'pruned'
    assert [strict(line)['step'] for line in (folder/'a'/'metrics.jsonl').read_text().splitlines()] == [5, 10, 12] * 3

def test_train_then_prune_then_run(folder):
    done = command('train', *OWN[1:], '--run-dir', 't', cwd=folder)
    assert done.returncode == 0 and done.stdout.endswith('model: t/baseline\n'), done.stderr
    done = command('prune', 't/baseline', '--run-dir', 'p', '--lam', '0.4', cwd=folder)
    assert done.returncode == 0 and '| control' not in done.stdout and '| pruned' in done.stdout, done.stderr
    assert json.loads((folder/'p'/'recipe.json').read_text())['lam'] == .4
    for job, d, rows in (('run', 't', 4), ('prune', 'p', 3), ('run', 'p', 4)):   # train goes on as run; what is finished only reports
        done = command(job, '--run-dir', d, '--resume', cwd=folder)
        assert done.returncode == 0 and done.stdout.count('|\n') == rows + 2, done.stderr
    assert command('run', '--run-dir', 't', '--resume', '--lam', '0.1', cwd=folder).stderr.startswith('allatt-prune: error: --lam=0.1: t was made with 0.5')

def test_a_model_that_comes_with_the_package(folder):
    score = command(*SCORE, 'tiny-books', cwd=folder)
    assert score.returncode == 0 and score.stderr.startswith('evaluation: ') and score.stderr.count('\n') == 1
    short = '--corpus own.txt --prune-steps 4 --prune-warmup 1 --gate-steps 2 --lam 5 --gate-lr 3 --lam-warmup 0 --valid-every 0 --log-every 1'.split()
    done = command('prune', 'tiny-books', *short, '--control', '--run-dir', 'x', cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[2:6]] == ['baseline', 'gated', 'pruned', 'control']
    assert command('evaluate', 'x/baseline', '--corpus', 'own.txt', cwd=folder).stdout == score.stdout + 'as in its report\n'
    shutil.copytree(folder/'good', folder/'tiny-books')                              # a folder of that name comes first
    assert command(*SCORE, 'tiny-books', cwd=folder).stdout == command(*SCORE, 'good', cwd=folder).stdout != score.stdout

def test_heads_chosen_by_a_score(folder):
    how = ['--corpus', 'own.txt', '--sparsity', '0.5', '--score-tokens', '2000']
    for method in ('random', 'gradient', 'leave_one_out', 'entropy'):
        said = command('score', 'good', *how, '--method', method, cwd=folder)
        assert (said.returncode, said.stderr.count('\n'), said.stdout.count('(')) == (0, 1 + (method == 'leave_one_out'), 4), said.stderr # 4 of 8 heads go
        assert 'good: its gates were left aside' in said.stderr and 'the 4 of 8 heads that go' in said.stdout
    prune = ['prune', 'good', *TOY, *how, '--method', 'gradient', '--repair', 'least_squares', '--run-dir', 'x']
    done = command(*prune, '--control', cwd=folder)
    assert done.returncode == 0 and '| pruned | 4/8 |' in done.stdout, done.stderr
    keep = json.loads((folder/'x'/'pruned'/'keep.json').read_text())
    assert sum(map(sum, keep)) == 4 and json.loads((folder/'x'/'report.json').read_text())['keep'] == keep
    shutil.rmtree(folder/'x'/'pruned')                                               # trained again from its checkpoint
    again = command('prune', '--resume', '--run-dir', 'x', '--control', cwd=folder)
    assert [line.split('|')[6] for line in again.stdout.splitlines()[2:5]] == [line.split('|')[6] for line in done.stdout.splitlines()[2:5]]
    assert 'Heads chosen by gradient, repair: least_squares' in (folder/'x'/'report.md').read_text()

def test_a_share_in_place_of_a_coefficient(folder):
    short = [*TOY, '--corpus', 'own.txt', '--lam-warmup', '1']
    for i, (how, kept) in enumerate(((['--sparsity', '0.75'], 2), (['--sparsity', '.5', '--method', 'subset'], 4))):
        done = command('prune', 'good', *short, *how, '--run-dir', f'x{i}', cwd=folder)
        assert done.returncode == 0 and f'| pruned | {kept}/8 |' in done.stdout, done.stderr
    assert 'Sparsity 0.5, trained subset' in (folder/'x1'/'report.md').read_text()

def test_a_recipe_by_name_keeps_what_it_says_unless_another_way_is_wished(folder):
    short = '--recipe best --corpus own.txt --prune-steps 4 --prune-warmup 1 --gate-steps 2 --lam-warmup 0 --valid-every 0 --log-every 1 --score-tokens 2000'.split()
    for i, (wish, kept, said) in enumerate(([[], 5, 'Heads chosen by leave_one_out'], (['--sparsity', '.5'], 4, 'Heads chosen by leave_one_out'),
                                            (['--method', 'random'], 5, 'Heads chosen by random'), (['--method', 'gates'], 5, 'Sparsity 0.4, trained gates'),
                                            (['--lam', '5', '--gate-lr', '3'], 0, 'Lambda 5'))):
        done, report = command('prune', 'good', *short, *wish, '--run-dir', f'n{i}', cwd=folder), folder/f'n{i}'/'report.md'
        assert done.returncode == 0, done.stderr
        assert f'| pruned | {kept}/8 |' in done.stdout
        assert said in report.read_text() and 'learned from it' in report.read_text() and 'Only the baseline was trained with dropout' in report.read_text()
        assert ('warning: lam=5.0: gates choose the heads, not leave_one_out as in the recipe' in done.stderr) == ('--lam' in wish)
    done = command('prune', 'good', *short, '--method', 'gates', '--sizes', '3,5', '--run-dir', 'sizes', cwd=folder)
    assert done.returncode == 0 and '| pruned | 3/8 |' in done.stdout and '| pruned-5 | 5/8 |' in done.stdout, done.stderr
    wrong = command('prune', 'good', *short, '--dropout', '.3', '--run-dir', 'w', cwd=folder)
    assert wrong.stderr == 'allatt-prune: error: --dropout=0.3: the recipe prunes without dropout; give --prune-dropout true, too\n' and not (folder/'w').exists()

def test_the_line_in_a_report_makes_the_run_again(folder):
    how = ['prune', 'good', *TOY, '--corpus', 'own.txt', '--method', 'gradient', '--sparsity', '0.5', '--score-tokens', '2000']
    assert command(*how, '--control', '--run-dir', 'a', cwd=folder).returncode == 0
    line = (folder/'a'/'report.md').read_text().split('```sh\n')[1].split('\n```')[0].replace('\\\n', ' ')
    assert line.startswith('allatt-prune prune a/baseline --recipe ') and line.endswith(' --control')
    done = command(*shlex.split(line)[1:], '--run-dir', 'b', cwd=folder)
    assert done.returncode == 0, done.stderr
    for name in ('pruned', 'control'):
        assert (folder/'a'/name/'model.safetensors').read_bytes() == (folder/'b'/name/'model.safetensors').read_bytes()

def test_what_a_model_says_of_itself_is_kept(folder):
    own = ['--recipe', 'best', *TOY, '--corpus', 'own.txt', '--score-tokens', '2000', '--run-dir', 'b']
    assert command('train', *own, cwd=folder).returncode == 0
    said = command('score', 'b/baseline', '--method', 'random', cwd=folder)
    assert 'characters of own' in said.stdout and said.stderr == '', said                  # the text of its run
    for wish, kept in ((['--sparsity', '.5'], 4), (['--method', 'gradient'], 5)):
        done = command('prune', 'b/baseline', *wish, '--run-dir', f'b{kept}', cwd=folder)
        assert done.returncode == 0 and f'| pruned | {kept}/8 |' in done.stdout, done.stderr
    assert 'Heads chosen by leave_one_out' in (folder/'b4'/'report.md').read_text() and 'Heads chosen by gradient' in (folder/'b5'/'report.md').read_text()
    done = command('prune', 'b4/baseline', '--run-dir', 'again', cwd=folder)          # its text is that of the run, too
    assert done.returncode == 0 and json.loads((folder/'again'/'recipe.json').read_text())['corpus'] == 'own.txt', done.stderr

def test_a_control_that_was_begun_is_finished(folder):
    how = ['prune', 'good', *TOY, '--corpus', 'own.txt', '--run-dir', 'c']
    done = command(*how, '--control', cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder/'c'/'pruned')
    again = command('prune', '--resume', '--run-dir', 'c', cwd=folder)
    assert again.returncode == 0 and '| control' in again.stdout, again.stderr

def test_pruning_with_another_dropout(folder):
    how = ['prune', 'good', *TOY, '--corpus', 'own.txt', '--run-dir', 'd', '--control', '--attn-dropout', '0.3']
    done = command(*how, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = {name: LM.from_pretrained(folder/'d'/name).cfg.attn_dropout for name in ('baseline', 'control', 'gated', 'pruned')}
    assert found == dict(baseline=.2, control=.3, gated=.3, pruned=.3)
    assert '--attn-dropout 0.3' in (folder/'d'/'report.md').read_text()
    assert command('prune', '--resume', '--run-dir', 'd', '--control', cwd=folder).stdout.splitlines()[:6] == done.stdout.splitlines()[:6]
    wrong = command('prune', 'good', *TOY, '--corpus', 'own.txt', '--run-dir', 'e', '--dropout', '1.5', cwd=folder)
    assert (wrong.returncode, wrong.stderr.count('\n')) == (2, 1) and '--dropout=1.5' in wrong.stderr and not (folder/'e').exists()

def test_several_sizes_from_one_training(folder):
    done = command('prune', 'good', *TOY, '--corpus', 'own.txt', '--lam-warmup', '1', '--sizes', '2,6,5', '--run-dir', 's', cwd=folder)
    assert done.returncode == 0 and all(f'| {name} | {n}/8 |' in done.stdout for name, n in (('pruned-6', 6), ('pruned-5', 5), ('pruned', 2))), done.stderr
    report = (folder/'s'/'report.md').read_text()
    assert 'One training for 2, 5, 6 heads' in report and '(front.png)' in report and '--sizes 2,5,6' in report
    found = {name: {tuple(x) for x in torch.tensor(json.loads((folder/'s'/name/'keep.json').read_text())).nonzero().tolist()} for name in ('pruned', 'pruned-5', 'pruned-6')}
    assert found['pruned'] < found['pruned-5'] < found['pruned-6']
    assert command('sample', 's/pruned-5', '--n', '5', cwd=folder).returncode == 0

def test_time(folder):
    small = '--n-layer 2 --d-model 32 --n-head 4 --n-persistent 8 --seg-len 8 --mem-len 8 --batch 2 --corpus own.txt'.split()
    done = command('time', *small, '--kept', '.75', '.5', '--dtype', 'bfloat16', cwd=folder)
    assert done.returncode == 0 and all(f'| fused | {n}/8 |' in done.stdout for n in (8, 6, 4)), done.stderr
    for wrong, named in (('--kept half', 'half'), ('huge', 'huge'), ('--batch 900', 'corpus=own.txt'), ('--device cuda:99', 'cuda:99')):
        done = command('time', *small, *wrong.split(), cwd=folder)
        assert done.returncode in (1, 2) and done.stderr.count('\n') == 1 and named in done.stderr, done.stderr

def test_evaluation_agrees_with_the_report_or_says_why_not(folder):
    done = command('prune', 'good', *TOY, '--corpus', 'own.txt', '--eval-tokens', '100', '--run-dir', 'e', cwd=folder)
    for model in ('baseline', 'gated', 'pruned'):
        said = command('evaluate', f'e/{model}', '--split', 'test', cwd=folder)      # the text is that of the model
        assert (said.returncode, said.stderr) == (0, 'evaluation: 100 to do\n') and 'over 99 tokens' in said.stdout and said.stdout.endswith('\nas in its report\n'), said.stdout
    for how in (['--tokens', '0'], ['--batch', '4']):
        assert 'not as in its report, which has ' in command('evaluate', 'e/pruned', *how, cwd=folder).stdout, how
    assert 'tokens=1: nothing to predict' in command('evaluate', 'e/pruned', '--tokens', '1', cwd=folder).stderr

def test_while_it_runs_there_are_lines(folder):
    done = command('prune', 'good', *TOY, '--corpus', 'own.txt', '--run-dir', 'w', '--control', cwd=folder)
    said = [line for line in done.stderr.splitlines() if 'warning' not in line]
    assert [line.split(':')[0] for line in said] == ['corpus=own.txt', 'control', 'gated', 'evaluation'], done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith('|')]
    assert max(map(len, table)) < 80 and 'baseline: as trained; ' in done.stdout

def test_what_a_model_writes(folder):
    def said(*args, **how): return command('sample', 'tiny-books', '--n', '40', *args, cwd=folder, **how).stdout
    first = said('--prompt', 'the sea ')
    assert len(first) == 8 + 40 + 1 and first.startswith('the sea ') and set(first) <= set(' abcdefghijklmnopqrstuvwxyz\n')
    assert said('--prompt', 'the sea ') == first != said('--prompt', 'the sea ', '--seed', '1')
    assert said('--prompt', '-', input='the sea ') == first
    assert said('--temperature', '0') == said('--temperature', '0', '--seed', '3') == said('--top-k', '1')
    assert len(command('sample', 'good', '--n', '0', cwd=folder).stdout) == 2                        # a space is there

def test_words_with_an_adaptive_softmax(folder):
    done = command(*OWN, '--unit', 'word', '--cutoffs', '3,6,4000', '--run-dir', 'w', cwd=folder)
    assert done.returncode == 0, done.stderr
    assert 'valid ppl | test ppl' in done.stdout
    report = json.loads((folder/'w'/'report.json').read_text())
    assert report['unit'] == 'word' and report['tokens'] == [len(RHYME.split()) * 60 // 20 - 1] * 2
    assert json.loads((folder/'w'/'pruned'/'config.json').read_text())['cutoffs'] == [3, 6]
    again = command('evaluate', 'w/pruned', '--corpus', 'own.txt', '--unit', 'word', '--split', 'test', cwd=folder)
    row = next(r for r in report['rows'] if r['model'] == 'pruned')
    assert f"perplexity {row['test']:.2f} over {report['tokens'][1]:,} tokens" in again.stdout, again.stderr

def test_every_head_may_go(folder):
    done = command(*OWN, '--run-dir', 'none', '--lam', '50', '--gate-lr', '5', '--lam-warmup', '0', cwd=folder)
    assert done.returncode == 0, done.stderr
    assert '| pruned | 0/8 |' in done.stdout

def test_help_names_what_there_is():
    from allatt_prune import importance, repair
    from allatt_prune.engine import options
    assert options.NAMES == dict(method=[*importance.METHODS], repair=[*repair.REPAIRS])

def test_schedules_that_contradict_themselves_are_refused_first(folder):
    done = command(*OWN, '--run-dir', 'never', '--prune-warmup', '50', cwd=folder)
    assert done.returncode == 2 and '--prune-warmup=50: longer than prune_steps=12; give less' in done.stderr, done.stderr
    assert not (folder/'never').exists()

def test_warned_of_gates_that_are_left_aside(folder):
    command(*OWN, '--run-dir', 'w', cwd=folder)
    done = command('prune', 'w/gated', *TOY, '--corpus', 'own.txt', '--run-dir', 'x', cwd=folder)
    assert done.returncode == 0 and 'its gates were left aside; heads were chosen anew' in done.stderr, done.stderr
