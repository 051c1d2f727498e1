"The real command, in its own process: what it refuses, what it leaves behind, how it ends."
import json, math, os, pickle, re, shlex, shutil, signal, subprocess, sys, warnings
from dataclasses import asdict
from pathlib import Path
import allatt_prune, pytest, torch
from allatt_prune.engine import checkpoint
from allatt_prune.engine.cli import main
from allatt_prune.gates import HeadGates
from allatt_prune.model import LM, LMConfig
from forks import command

PRUNING = '--batch 4 --log-every 5 --prune-steps 12 --prune-warmup 2 --lam-warmup 2 --gate-steps 6 --gate-lr 0.3 --lam 0.5'.split()
TOY = '--n-layer 2 --d-model 32 --n-head 4 --n-persistent 16 --seg-len 16 --mem-len 16 --steps 12 --warmup 2'.split() + PRUNING
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
    save('gated')
    checkpoint.save(folder/'good', config=asdict(cfg), model=model, vocab=dict(unit='char', symbols=symbols))
    checkpoint.save(folder/'no-words', config=asdict(cfg), model=model)
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
PRUNE = ['prune', 'good', *PRUNING, '--corpus', 'own.txt']
SHORT = '--prune-steps 4 --prune-warmup 1 --gate-steps 2 --lam-warmup 0 --valid-every 0 --log-every 1'.split()
REFUSED = [ # arguments, exit status, what the line must name
    ([], 2, 'required: command'), # what was typed
    (['fly'], 2, "'fly'"),
    ([*RUN, 'surplus'], 2, 'surplus'),
    ([*RUN, '--steps'], 2, '--steps: expected one argument'),
    ([*RUN, '--lamda', '0.2'], 2, 'unrecognized arguments: --lamda'),
    ([*RUN, '--prune-s', '2'], 2, 'unrecognized arguments: --prune-s'),
    (['run', 'huge'], 2, 'recipe=huge: unknown; give one of text8'),
    ([*RUN, '--recipe', 'huge'], 2, "--recipe: invalid choice: 'huge'"),
    (['run', 'tiny', '--recipe', 'tiny'], 2, 'not allowed with'),
    ([*RUN, '--sizes', '3,5'], 2, 'unrecognized arguments: --sizes'),
    ([*RUN, '--steps', 'ten'], 2, "--steps: invalid int value: 'ten'"),
    ([*RUN, '--cutoffs', '3,x'], 2, '--cutoffs: invalid integers value'),
    ([*RUN, '--output-scale', 'maybe'], 2, "--output-scale: invalid choice: 'maybe'"),
    ([*RUN, '--method', 'glue'], 2, "--method: invalid choice: 'glue'"),
    ([*RUN, '--repair', 'glue'], 2, "--repair: invalid choice: 'glue'"),
    ([*RUN, '--sparsity', '.4', '--heads', '3'], 2, '--heads: not allowed with argument --sparsity'),
    (['prune'], 2, 'one of the arguments model --resume is required'),
    (['prune', 'good', '--recipe', 'best', '--corpus', 'own.txt', '--dropout', '.3'], 2, 'dropout=0.3: the recipe prunes without dropout; give'),
    (['prune', 'good', '--resume'], 2, '--resume: not allowed with argument model'),
    (['prune', 'good', '--d-model', '64'], 2, 'unrecognized arguments: --d-model'),
    ([*SCORE], 2, 'required: model'),
    ([*SCORE, 'good', '--split', 'trian'], 2, "--split: invalid choice: 'trian'"),
    (['score', 'good', '--method', 'entrpy'], 2, "--method: invalid choice: 'entrpy'"),
    (['sample', 'good', '--n', '1.5'], 2, "--n: invalid int value: '1.5'"),
    (['time', 'tiny', '--kept', 'half'], 2, "--kept: invalid float value: 'half'"),
    ([*OWN, '--run-dir', '-dash'], 2, '--run-dir: expected one argument'),
    ([*OWN, '--device', 'abacus'], 2, 'device=abacus'), # values
    ([*OWN, '--device', '\x1b[2Jabacus'], 2, 'device=\\x1b[2Jabacus'),
    ([*RUN, '--steps', '0'], 2, 'steps=0'),
    ([*RUN, '--lr', 'nan'], 2, 'lr=nan'),
    ([*RUN, '--lam=-inf'], 2, 'lam=-inf'),
    ([*RUN, '--n-head', '7'], 2, 'n_head=7'),
    ([*RUN, '--n-layer', '1000000000'], 2, 'n_layer=1000000000'),
    ([*RUN, '--dtype', 'float8'], 2, 'dtype=float8'),
    ([*RUN, '--prune-warmup', '50'], 2, 'prune_warmup=50: longer than prune_steps=12'),
    ([*OWN, '--cutoffs', '5'], 2, 'cutoffs=[5]'),
    (['score', 'good', '--corpus', 'own.txt', '--sparsity', '1.5'], 2, 'sparsity=1.5: not a share'),
    (['score', 'good', '--corpus', 'own.txt', '--heads', '0'], 2, 'all heads would go'),
    (['score', 'good', '--corpus', 'own.txt', '--score-tokens', '20', '--method', 'entropy'], 2, 'score_tokens=20: 8 streams'),
    ([*PRUNE, '--method', 'subset'], 2, 'sparsity=0: method subset needs a share'),
    ([*PRUNE, '--repair', 'mean_folded'], 2, 'repair=mean_folded: only for heads that a score chooses'),
    ([*PRUNE, '--method', 'entropy', '--sparsity', '.5', '--score-tokens', '20'], 2, 'score_tokens=20: 8 streams need'),
    ([*PRUNE, '--sparsity', '.01'], 2, 'sparsity=0.01: no head would go'),
    ([*PRUNE, '--heads', '9'], 2, 'sparsity=-0.125'),
    ([*PRUNE, '--dropout', '1.5'], 2, 'dropout=1.5'),
    ([*PRUNE, '--run-dir', 'good/below'], 2, 'run_dir=good/below'),
    (['sample', 'good', '--prompt', 'Ones'], 1, "the model does not know 'O'; give a text of"),
    (['sample', 'good', '--temperature', '-1'], 2, 'temperature=-1.0: not a number from 0'),
    (['sample', 'good', '--top-k', '-1'], 2, 'top_k=-1: negative'),
    (['evaluate', 'good', '--corpus', 'own.txt', '--unit', 'word'], 2, 'unit=word: the model was made with unit=char'),
    ([*SCORE, 'good', '--mem-len', '1000000000'], 1, 'allocate'),
    ([*OWN, '--batch', '1000000000'], 1, 'corpus=own.txt'), # files
    ([*RUN, '--corpus', 'wikipedia'], 2, 'corpus=wikipedia'),
    ([*RUN, '--corpus', 'a\nb'], 2, 'corpus=a\\nb: '),
    ([*RUN, '--corpus', 'no/such.txt'], 1, 'corpus=no/such.txt'),
    ([*RUN, '--corpus', '\x1b[31mred.txt'], 1, 'corpus=\\x1b[31mred.txt: no such file'),
    ([*RUN, '--corpus', 'blank.txt'], 1, 'corpus=blank.txt'),
    ([*RUN, '--corpus', 'latin.txt'], 1, 'byte 3'),
    ([*RUN, '--corpus', 'short.txt'], 1, 'corpus=short.txt'),
    *(([*OWN, '--run-dir=' + d], 1, 'run_dir=' + d) for d in ('taken', 'two words', 'größe', '-dash', 'own.txt', 'own.txt/below', '/proc/here')),
    ([*OWN, '--run-dir', ''], 1, 'run_dir=.: exists'),
    ([*OWN, '--run-dir', 'x' * 300], 1, 'File name too long'),
    ([*OWN, '--cache', 'own.txt/below'], 1, 'own.txt/below'),
    *(([*OWN, '--run-dir', d, '--resume'], 1, f'run_dir={d}: no manifest.json with recipe.json there, so no run') for d in ('none', 'broken-run')),
    ([*SCORE, 'no/such'], 1, 'checkpoint=no/such: not found'), # models
    (['score', 'no/such'], 1, 'checkpoint=no/such: not found'),
    *(([job, 'taken'], 1, 'checkpoint=taken: no manifest.json') for job in ('evaluate', 'prune', 'score', 'sample')),
    *(([*SCORE, f], 1, f'checkpoint={f}: not a folder') for f in ('empty.safetensors', 'notes.safetensors', 'page.html', 'bomb.pt')),
    *(([*SCORE, d], 1, f'checkpoint={d}: model.safetensors is damaged') for d in ('cut', 'flipped', 'bomb')),
    ([*SCORE, 'bomb-with-papers'], 1, 'model.safetensors is not safetensors'),
    ([*SCORE, 'newer'], 1, 'manifest.json is damaged, or of a newer allatt_prune'),
    ([*SCORE, 'other-words'], 1, "corpus=own.txt: the model does not know"),
    ([*SCORE, 'other-shape'], 1, 'size mismatch for pos'),
    ([*SCORE, 'enormous'], 1, 'n_layer=1000000000'),
    ([*SCORE, 'not-a-number'], 1, 'layers.1.attn.pv is not finite'),
    ([*SCORE, 'gates-nan'], 1, 'log_alpha is not finite'),
    ([*SCORE, 'gates-long'], 1, 'size mismatch for log_alpha'),
    *(([job, 'no-words', *how], 1, 'checkpoint=no-words: saved without its vocabulary') for job, how in (
        ('evaluate', ['--corpus', 'own.txt']), ('score', ['--corpus', 'own.txt']), ('sample', []), ('prune', [*PRUNING, '--corpus', 'own.txt']))),
    *(([job, 'tiny-books-pruned'], 1, 'checkpoint=tiny-books-pruned: heads were removed already') for job in ('score', 'prune')),
]
name_of = lambda case: ascii(' '.join(a[:40] for a in case[0] if a not in TOY)) or 'nothing'

@pytest.fixture(scope='session')
def outcomes(tmp_path_factory, cache): # a process for each, with a folder of its own
    template = fill(tmp_path_factory.mktemp('template'))
    env = os.environ | dict(ALLATT_PRUNE_CACHE=str(cache), OMP_NUM_THREADS='1')
    command('score', 'good', '--method', 'random', '--corpus', str(template/'own.txt'), cwd=template, env=env) # prepares the text
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
    lines = done.stderr.strip().splitlines()
    assert done.returncode == status, done.stderr
    assert len(lines) == 1 and lines[0].startswith('allatt-prune: error: ') and named in lines[0], done.stderr
    assert done.stdout == '' and not changed and lines[0].isprintable()

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

def test_ctrl_c_while_libraries_are_loaded(folder):
    (folder/'shim').mkdir()
    (folder/'shim'/'safetensors.py').write_text('import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n')
    path = f"{folder/'shim'}:{os.environ.get('PYTHONPATH', '')}"
    def heard(*command):                                                               # also where the tests themselves run in the background of a shell, which ignores Ctrl-C
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env=os.environ | dict(PYTHONPATH=path),
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    done = heard(sys.executable, '-m', 'allatt_prune', 'train', '--corpus', 'own.txt')
    assert (done.returncode, done.stdout, done.stderr) == (130, '', 'allatt-prune: stopped by SIGINT\n')
    assert 'KeyboardInterrupt' in heard(sys.executable, '-c', 'from allatt_prune import LM').stderr # in somebody's program it is hers

def test_what_prune_copies(folder):
    (folder/'good'/'endless').symlink_to('/dev/zero')
    (folder/'good'/'notes.txt').write_text('mine')
    done = command(*PRUNE, '--run-dir', 'p', cwd=folder)
    assert done.returncode == 0, done.stderr
    kept = {f.name for f in (folder/'good').iterdir()} - {'endless', 'notes.txt'} | {'README.md'}   # the card is new
    assert {f.name for f in (folder/'p'/'baseline').iterdir()} == kept

def test_debug_shows_the_traceback(folder):
    done = command('run', '--corpus', 'no/such.txt', '--debug', cwd=folder)
    assert done.returncode != 0 and 'Traceback' in done.stderr

def test_version(folder):
    assert command('--version', cwd=folder).stdout == f'allatt-prune {allatt_prune.__version__}\n'

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
    done = command('prune', 't', '--run-dir', 'p', '--lam', '0.4', cwd=folder)
    assert done.returncode == 0 and '| control' not in done.stdout and '| pruned' in done.stdout, done.stderr
    assert json.loads((folder/'p'/'recipe.json').read_text())['lam'] == .4
    for job, d, rows in (('run', 't', 4), ('prune', 'p', 3), ('run', 'p', 4)):   # train goes on as run; what is finished only reports
        done = command(job, '--run-dir', d, '--resume', cwd=folder)
        assert done.returncode == 0 and done.stdout.count('|\n') == rows + 2, done.stderr
    assert command('run', '--run-dir', 't', '--resume', '--lam', '0.1', cwd=folder).stderr.startswith('allatt-prune: error: lam=0.1: t was made with 0.5')

def test_a_model_that_comes_with_the_package(folder):
    score = command(*SCORE, 'tiny-books', cwd=folder)
    assert score.returncode == 0 and score.stderr.startswith('evaluation: ') and score.stderr.count('\n') == 1
    short = '--corpus own.txt --lam 5 --gate-lr 3'.split()
    done = command('prune', 'tiny-books', *SHORT, *short, '--control', '--run-dir', 'x', cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[2:6]] == ['baseline', 'gated', 'pruned', 'control']
    assert command('evaluate', 'x/baseline', '--corpus', 'own.txt', cwd=folder).stdout == score.stdout
    shutil.copytree(folder/'good', folder/'tiny-books')                              # a folder of that name comes first
    assert command(*SCORE, 'tiny-books', cwd=folder).stdout == command(*SCORE, 'good', cwd=folder).stdout != score.stdout

def test_heads_chosen_by_a_score(folder):
    how = ['--corpus', 'own.txt', '--score-tokens', '2000']
    for method, share in (('random', '--sparsity=.5'), ('gradient', '--heads=4'), ('leave_one_out', '--heads=4'), ('gate', '--sparsity=.5')):
        said = command('score', 'gated', *how, share, '--method', method, cwd=folder)
        assert (said.returncode, said.stdout.count('(')) == (0, 4) and 'the 4 of 8 heads to remove' in said.stdout, said.stderr
        assert ('gated: its gates are ignored' in said.stderr) == (method != 'gate')
    prune = ['prune', 'gated', *PRUNE[2:], '--score-tokens', '2000', '--heads', '4', '--method', 'gradient', '--repair', 'least_squares', '--run-dir', 'x', '--control']
    done = command(*prune, cwd=folder)
    assert done.returncode == 0 and '| pruned | 4/8 |' in done.stdout and 'gated: its gates are ignored' in done.stderr, done.stderr
    keep = json.loads((folder/'x'/'pruned'/'keep.json').read_text())
    assert sum(map(sum, keep)) == 4 and json.loads((folder/'x'/'report.json').read_text())['keep'] == keep
    shutil.rmtree(folder/'x'/'pruned')                                               # trained again from its checkpoint
    again = command('prune', '--resume', '--run-dir', 'x', '--control', cwd=folder)
    assert [line.split('|')[6] for line in again.stdout.splitlines()[2:5]] == [line.split('|')[6] for line in done.stdout.splitlines()[2:5]]
    assert 'Heads chosen by gradient, repair: least_squares' in (folder/'x'/'report.md').read_text()

WISHES = [ # a recipe, options, heads that stay, what the report says of the way
    ('tiny', [], None, 'Lambda 0.1'),
    ('tiny', ['--sparsity', '.75'], 2, 'Sparsity 0.75, trained gates'),
    ('tiny', ['--heads', '3'], 3, 'Sparsity 0.625, trained gates'),
    ('tiny', ['--sparsity', '.5', '--method', 'subset'], 4, 'Sparsity 0.5, trained subset'),
    ('best', [], 5, 'Heads chosen by leave_one_out'),
    ('best', ['--sparsity', '.5'], 4, 'Heads chosen by leave_one_out'),
    ('best', ['--method', 'random'], 5, 'Heads chosen by random'),
    ('best', ['--method', 'gates'], 5, 'Sparsity 0.4, trained gates'),
    ('best', ['--lam', '5', '--gate-lr', '3'], 0, 'Lambda 5'),
    ('best', ['--lam', '5', '--sparsity', '.5'], 4, 'Heads chosen by leave_one_out'),
]
@pytest.mark.parametrize('recipe,wish,kept,said', WISHES, ids=[' '.join([w[0], *w[1]]) for w in WISHES])
def test_options_change_single_settings_of_a_recipe(folder, recipe, wish, kept, said):
    start = ['prune', 'good', '--recipe', recipe, *SHORT, '--corpus', 'own.txt', '--score-tokens', '2000']
    done, report = command(*start, *wish, '--run-dir', 'x', cwd=folder), folder/'x'/'report.md'
    assert done.returncode == 0 and (kept is None or f'| pruned | {kept}/8 |' in done.stdout), done.stderr
    assert said in report.read_text() and ('learned from it' in report.read_text()) == (recipe == 'best')

def test_the_line_in_a_report_makes_the_run_again(folder):
    how = ['prune', 'good', '--recipe', 'best', *SHORT, '--corpus', 'own.txt', '--lam', '5', '--sparsity', '0.4', '--score-tokens', '2000']
    assert command(*how, '--control', '--run-dir', 'a', cwd=folder).returncode == 0
    line = (folder/'a'/'report.md').read_text().split('```sh\n')[1].split('\n```')[0].replace('\\\n', ' ')
    assert line.startswith('allatt-prune prune a/baseline --recipe ') and line.endswith(' --control') and '--lam' in line
    done = command(*shlex.split(line)[1:], '--run-dir', 'b', cwd=folder)
    assert done.returncode == 0, done.stderr
    for name in ('pruned', 'control'):
        assert (folder/'a'/name/'model.safetensors').read_bytes() == (folder/'b'/name/'model.safetensors').read_bytes()

def test_a_model_brings_its_recipe_and_its_text(folder):
    own = ['best', *TOY, '--sparsity', '.4', '--corpus', 'own.txt', '--score-tokens', '2000', '--run-dir', 'b']
    assert command('train', *own, cwd=folder).returncode == 0
    for model in ('b', 'b/baseline'):
        said = command('score', model, '--method', 'random', cwd=folder)
        assert 'characters of own' in said.stdout and said.stderr == '', said
    for wish, kept in ((['--sparsity', '.5'], 4), (['--method', 'gradient'], 5)):
        done = command('prune', 'b', *wish, '--run-dir', f'b{kept}', cwd=folder)
        assert done.returncode == 0 and f'| pruned | {kept}/8 |' in done.stdout, done.stderr
    assert 'Heads chosen by leave_one_out' in (folder/'b4'/'report.md').read_text() and 'Heads chosen by gradient' in (folder/'b5'/'report.md').read_text()
    done = command('prune', 'b4', '--run-dir', 'again', cwd=folder)                  # its text is that of the run, too
    assert done.returncode == 0 and json.loads((folder/'again'/'recipe.json').read_text())['corpus'] == 'own.txt', done.stderr
    (folder/'own.txt').rename(folder/'away.txt')                                     # not silently another one
    assert 'corpus=own.txt: no such file' in command('evaluate', 'again', cwd=folder).stderr

def test_the_folder_of_a_run_is_its_pruned_model_or_its_baseline(folder):
    assert command('run', *OWN[1:], '--run-dir', 'r', cwd=folder).returncode == 0
    same = lambda *a: command(a[0], 'r', *a[1:], cwd=folder).stdout == command(a[0], f'r/{name}', *a[1:], cwd=folder).stdout != ''
    for name in ('pruned', 'baseline'):
        assert same('evaluate') and same('sample', '--n', '20')
        if name == 'pruned': shutil.rmtree(folder/'r'/'pruned')
    assert same('score', '--score-tokens', '2000')

def test_pruning_with_another_dropout(folder):
    how = [*PRUNE, '--run-dir', 'd', '--control', '--attn-dropout', '0.3']
    done = command(*how, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = {name: LM.from_pretrained(folder/'d'/name).cfg.attn_dropout for name in ('baseline', 'control', 'gated', 'pruned')}
    assert found == dict(baseline=.2, control=.3, gated=.3, pruned=.3)
    assert '--attn-dropout 0.3' in (folder/'d'/'report.md').read_text()
    assert command('prune', '--resume', '--run-dir', 'd', '--control', cwd=folder).stdout.splitlines()[:6] == done.stdout.splitlines()[:6]

def test_time(folder):
    small = '--n-layer 2 --d-model 32 --n-head 4 --n-persistent 8 --seg-len 8 --mem-len 8 --batch 2 --corpus own.txt'.split()
    done = command('time', *small, '--kept', '.75', '.5', '--dtype', 'bfloat16', cwd=folder)
    assert done.returncode == 0 and all(f'| fused | {n}/8 |' in done.stdout for n in (8, 6, 4)), done.stderr
    for wrong, named in (('huge', 'huge'), ('--batch 900', 'corpus=own.txt'), ('--device cuda:99', 'cuda:99')):
        done = command('time', *small, *wrong.split(), cwd=folder)
        assert done.returncode in (1, 2) and done.stderr.count('\n') == 1 and named in done.stderr, done.stderr

def test_evaluation_reads_what_the_report_read_unless_told_otherwise(folder):
    command(*PRUNE, '--eval-tokens', '100', '--run-dir', 'e', cwd=folder)
    rows = {r['model']: r for r in json.loads((folder/'e'/'report.json').read_text())['rows']}
    for model in ('gated', 'pruned'):
        said = command('evaluate', f'e/{model}', '--split', 'test', cwd=folder)      # the text is that of the model
        assert (said.returncode, said.stderr) == (0, 'evaluation: 100 to do\n') and f"{rows[model]['test']:.4f} bits" in said.stdout and 'over 99 tokens' in said.stdout, said
    assert 'over 99 tokens' not in command('evaluate', 'e/pruned', '--tokens', '0', cwd=folder).stdout
    assert 'nothing to predict' in command('evaluate', 'e', '--tokens', '1', cwd=folder).stderr
    assert 'over 49 tokens' in command('evaluate', 'e', '--tokens', '50', '--batch', '4', cwd=folder).stdout

def test_while_it_runs_there_are_lines(folder):
    done = command(*PRUNE, '--run-dir', 'w', '--control', cwd=folder)
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

def test_a_crowded_machine_is_said(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, 'getloadavg', lambda: (9., 9., 9.))
    threads = torch.get_num_threads()
    try:
        for n, warned in ((2, True), (1, False)):
            torch.set_num_threads(n)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter('always')
                main(['train', *OWN[1:], '--run-dir', f'crowd{n}'])
            assert any('others work on this machine' in str(w.message) for w in said) == warned
    finally: torch.set_num_threads(threads)
