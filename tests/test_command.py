"The real command in its own process: what it refuses, what it leaves behind, how it ends."
import hashlib, json, os, pickle, re, shutil, signal, subprocess, sys
from dataclasses import asdict
import allatt_prune, pytest, torch
from allatt_prune.engine import checkpoint
from allatt_prune.gates import HeadGates
from allatt_prune import LM, LMConfig
from forks import command

PRUNING = '--batch 4 --log-every 5 --prune-steps 12 --prune-warmup 2 --lam-warmup 2 --gate-steps 6 --gate-lr 0.3 --lam 0.5'.split()
TOY = '--n-layer 2 --d-model 32 --n-head 4 --n-persistent 16 --seg-len 16 --mem-len 16 --steps 12 --warmup 2'.split() + PRUNING
SHORT = '--prune-steps 4 --prune-warmup 1 --gate-steps 2 --lam-warmup 0 --valid-every 0 --log-every 1'.split()
RHYME = 'one two buckle my shoe three four knock at the door '
SYMBOLS = sorted(set(RHYME))

class Bomb: # a malicious pickle
    def __reduce__(self): return os.system, ('touch exploded',)

def damaged(folder, name, content): # a copy of a model with other weights
    shutil.copytree(folder/'good', folder/name)
    file = folder/name/'model.safetensors'
    file.write_bytes(content(file.read_bytes()))

def fill(folder): # texts, taken names, and saved models in every state of damage
    (folder/'own.txt').write_text(RHYME * 60)
    (folder/'short.txt').write_text(RHYME)
    (folder/'taken').mkdir()
    (folder/'taken'/'result').write_text('precious')
    torch.manual_seed(0)
    cfg = LMConfig(vocab=len(SYMBOLS), n_layer=2, d_model=32, n_head=4, n_persistent=16, seg_len=16, mem_len=16)
    model, gates = LM(cfg).state_dict(), HeadGates(2, 4)
    good = dict(config=asdict(cfg), model=model, vocab=dict(unit='char', symbols=SYMBOLS))
    def save(name, **changes): checkpoint.save(folder/name, **good | changes)
    save('good')
    save('gated', gates=gates.state_dict(), z=dict(z=gates.eval()()))
    save('no-z', gates=gates.state_dict())
    checkpoint.save(folder/'no-words', config=asdict(cfg), model=model)
    save('other-words', vocab=dict(unit='char', symbols=SYMBOLS[:-1] + ['~']))
    save('other-shape', config=asdict(cfg) | dict(d_model=64))
    (folder/'bomb.pt').write_bytes(pickle.dumps(Bomb()))
    damaged(folder, 'cut', lambda data: data[:-7])
    damaged(folder, 'flipped', lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:])
    damaged(folder, 'bomb', lambda data: pickle.dumps(Bomb()))
    manifest = folder/'bomb'/'manifest.json' # and its hash is right
    wrong, right = (hashlib.sha256((folder/f/'model.safetensors').read_bytes()).hexdigest() for f in ('good', 'bomb'))
    manifest.write_text(manifest.read_text().replace(wrong, right))
    (folder/'broken-run').mkdir()
    (folder/'broken-run'/'recipe.json').write_text('{"steps": 1')
    return folder

@pytest.fixture(scope='session')
def cache(tmp_path_factory): return tmp_path_factory.mktemp('cache')

@pytest.fixture
def folder(tmp_path, cache, monkeypatch):
    monkeypatch.setenv('ALLATT_PRUNE_CACHE', str(cache))
    return fill(tmp_path)

def done(folder, *args, **how): # a command that must succeed
    result = command(*args, cwd=folder, **how)
    assert result.returncode == 0, result.stderr
    return result

def report(folder, name): return json.loads((folder/name/'report.json').read_text())
def state(folder): return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob('*')}

RUN, SCORE = ['run', *TOY], ['evaluate', '--corpus', 'own.txt']
OWN = [*RUN, '--corpus', 'own.txt']
PRUNE = ['prune', 'good', *PRUNING, '--corpus', 'own.txt']
REFUSED = [ # arguments, exit status, what the line must name
    ([], 2, 'required: command'), # syntax
    ([*RUN, '--prune-s', '2'], 2, 'unrecognized arguments: --prune-s'),
    *((words, 2, f'; did you mean {meant}') for words, meant in ((['run', '--stesp=3'], '--steps'), (['run', '--n_layer', '3'], '--n-layer'), # misspelt
        (['run', '--save_evry', '3'], '--save-every'), (['prune', 'good', '--stesp', '3'], '--gate-steps or --prune-steps'), (['evaluate', '--model', 'good'], 'MODEL'))),
    (['evaluate', 'good', '--colour'], 2, 'unrecognized arguments: --colour'),
    ([*RUN, '--cutoffs', '3,x'], 2, '--cutoffs: invalid integers value'),
    (['prune'], 2, 'give a model or --resume'),
    (['prune', 'good', '--d-model', '64'], 2, 'unrecognized arguments: --d-model'),
    (['run', 'huge'], 2, 'recipe=huge'), # values
    ([*OWN, '--device', 'abacus'], 1, 'abacus'),
    ([*RUN, '--steps', '0'], 2, 'steps=0'),
    ([*PRUNE, '--method', 'glue'], 2, 'method=glue'),
    *(([job, 'good', '--corpus', 'own.txt', '--heads', n], 2, f'heads={n}: give 1 to 7') for job in ('prune', 'score') for n in '089'),
    (['score', 'good', '--corpus', 'own.txt', '--method', 'entrpy'], 2, 'entrpy'),
    (['sample', 'good', '--prompt', 'Zip'], 1, "the model does not know 'z'"),
    ([*RUN, '--corpus', '\x1b[31mred.txt'], 1, 'corpus=\\x1b[31mred.txt: no such file'), # files
    ([*RUN, '--corpus', 'short.txt'], 1, 'corpus=short.txt'),
    *(([*OWN, '--run-dir', d], 1, said) for d, said in {'taken': 'taken: exists', 'own.txt/below': 'own.txt', '/proc/here': '/proc/.here'}.items()),
    *(([*OWN, '--run-dir', d, '--resume'], 1, f'{d}: ') for d in ('none', 'broken-run')),
    *(([job, 'no/such'], 1, 'no/such: not found') for job in ('evaluate', 'score')), # models
    *(([job, 'taken'], 1, 'taken: no manifest.json') for job in ('evaluate', 'prune', 'score', 'sample')),
    *(([job, 'no-words'], 1, 'vocab') for job in ('evaluate', 'prune', 'score', 'sample')),
    *(([job, 'tiny-books-pruned'], 2, 'heads were removed') for job in ('score', 'prune')),
    (['sample', 'no-z'], 2, 'model=no-z: saved without z'),
    *(([*SCORE, name], 1, said) for name, said in {
        'bomb.pt': 'bomb.pt: no manifest.json there', 'bomb': 'header too large',
        'cut': 'model.safetensors is damaged', 'flipped': 'model.safetensors is damaged',
        'other-words': 'corpus=own.txt: the model does not know', 'other-shape': 'size mismatch for pos'}.items()),
]
def name_of(case): return ascii(' '.join(a[:40] for a in case[0] if a not in TOY)) or 'nothing'

@pytest.fixture(scope='session')
def template(tmp_path_factory): return fill(tmp_path_factory.mktemp('template'))

@pytest.mark.parametrize('case', REFUSED, ids=map(name_of, REFUSED))
def test_refused_in_one_line_and_nothing_written(template, tmp_path, cache, case):
    (words, status, named), here = case, tmp_path/'here'
    shutil.copytree(template, here)
    before = state(here)
    end = command(*words, cwd=here, env=os.environ | dict(ALLATT_PRUNE_CACHE=str(cache), OMP_NUM_THREADS='1'))
    lines = end.stderr.strip().splitlines()
    assert end.returncode == status, end.stderr
    assert len(lines) == 1 and lines[0].startswith('allatt-prune: error: ') and named in lines[0], end.stderr
    assert end.stdout == '' and state(here) == before and lines[0].isprintable()

def test_names_that_are_no_text_and_terminals_that_know_no_signs(folder):
    shutil.copy(folder/'own.txt', folder/os.fsdecode(b'caf\xe9.txt')) # Latin-1
    words = [sys.executable, '-m', 'allatt_prune', *RUN, '--corpus', os.fsdecode(b'caf\xe9.txt'), '--run-dir', 'x']
    end = subprocess.run(words, cwd=folder, capture_output=True, timeout=300, env=os.environ | dict(PYTHONIOENCODING='ascii'))
    assert end.returncode == 0 and b'Pruned' in end.stdout, end.stderr
    assert 'corpus caf?.txt' in (folder/'x'/'report.md').read_text(encoding='utf-8')

def test_ctrl_c_while_libraries_are_loaded(folder):
    (folder/'shim').mkdir()
    shim = 'import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n'
    (folder/'shim'/'safetensors.py').write_text(shim)
    env = os.environ | dict(PYTHONPATH=f"{folder/'shim'}:{os.environ.get('PYTHONPATH', '')}")
    words = [sys.executable, '-m', 'allatt_prune', 'train', '--corpus', 'own.txt']
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored by what runs in the background of a shell
    end = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, env=env, preexec_fn=heed)
    assert (end.returncode, end.stdout) == (130, '')
    assert end.stderr.startswith('allatt-prune: stopped; ') and end.stderr.count('\n') == 1

def test_prune_copies_only_what_is_in_the_manifest(folder):
    (folder/'good'/'endless').symlink_to('/dev/zero')
    (folder/'good'/'notes.txt').write_text('mine')
    done(folder, *PRUNE, '--run-dir', 'p')
    kept = {f.name for f in (folder/'good').iterdir()} - {'endless', 'notes.txt'}
    assert {f.name for f in (folder/'p'/'baseline').iterdir()} == kept

def test_version_and_debug(folder):
    assert done(folder, '--version').stdout == f'allatt-prune {allatt_prune.__version__}\n'
    end = command('run', '--corpus', 'no/such.txt', '--debug', cwd=folder)
    assert end.returncode != 0 and 'Traceback' in end.stderr

def rows(said): # of the table that a command prints
    return [re.split(r' ?\| ?', line)[1:-1] for line in said.splitlines() if line.startswith('| ')][1:]

def test_run_twice_gives_the_same_files_and_never_overwrites(folder):
    for name in ('a', 'b'):
        said = done(folder, *OWN, '--run-dir', name).stdout
        assert said.startswith('Pruned ') and said.endswith(f'report: {name}/report.md\nmodel: {name}/pruned\n')
    heads, told = [sum(layer) for layer in report(folder, 'a')['keep']], (folder/'a'/'report.md').read_text()
    assert f'\n| heads of each layer | {heads} |\n' in told
    assert f"\n| command | allatt-prune {' '.join(OWN)} --run-dir a |\n" in told
    assert 'to train on; 155 of validation and 155 of test text were scored' in told # of 156 each
    for f in [*(f'{m}/model.safetensors' for m in ('baseline', 'control', 'gated', 'pruned')), 'metrics.jsonl']:
        assert (folder/'a'/f).read_bytes() == (folder/'b'/f).read_bytes()
    before = state(folder)
    assert command(*OWN, '--run-dir', 'a', cwd=folder).returncode == 1
    assert state(folder) == before
    def strict(text): return json.loads(text, parse_constant=pytest.fail) # no NaN or Infinity, which are not JSON
    assert strict((folder/'a'/'report.json').read_text())['rows'][2]['model'] == 'pruned'
    assert [strict(line)['step'] for line in (folder/'a'/'metrics.jsonl').read_text().splitlines()] == [5, 10, 12] * 3

def test_train_then_prune_then_run(folder):
    assert done(folder, 'train', *OWN[1:], '--run-dir', 't').stdout.endswith('report: t/report.md\nmodel: t/baseline\n')
    said = done(folder, 'prune', 't', '--run-dir', 'p', '--lam', '0.4').stdout
    assert '| control' not in said and '| pruned' in said and report(folder, 'p')['recipe']['lam'] == .4
    for job, d, rows in (('run', 't', 4), ('prune', 'p', 3), ('run', 'p', 4)): # train goes on as run
        assert done(folder, job, '--run-dir', d, '--resume').stdout.count('|\n') == rows + 2
    changed = command('run', '--run-dir', 't', '--resume', '--lam', '0.1', cwd=folder)
    assert changed.stderr.startswith('allatt-prune: error: lam=0.1: t was made with 0.5')

def test_a_model_that_comes_with_the_package(folder):
    score, few = done(folder, *SCORE, 'tiny-books'), 'allatt-prune: warning: text=156 symbols: so few give a coarse loss; give 2,000 or more\n'
    assert score.stderr == few                                 # and a short job shows no progress
    assert done(folder, *SCORE, 'tiny-books', '--split', 'train').stderr == ''
    said = done(folder, 'prune', 'tiny-books', *SHORT, '--corpus', 'own.txt', '--lam', '5', '--control', '--run-dir', 'x')
    names = ['baseline', 'gated', 'pruned', 'control']
    assert [row[0] for row in rows(said.stdout)] == names
    own = few.replace('text=', 'test part of the text=')
    assert said.stderr.count(own) == 1
    first, plan, *more = said.stderr.replace(own, '').splitlines() # short jobs show no progress
    assert first.startswith('corpus=own.txt: ') and plan.startswith('pruned ') and plan.endswith(' on a CPU')
    assert {line.split(':')[0].split(' ')[0].strip(',') for line in more} <= {'gated', 'control', 'timing', 'evaluation'}
    assert done(folder, 'evaluate', 'x/baseline', '--corpus', 'own.txt').stdout == score.stdout
    shutil.copytree(folder/'good', folder/'tiny-books') # a folder of that name comes first
    assert done(folder, *SCORE, 'tiny-books').stdout == done(folder, *SCORE, 'good').stdout != score.stdout

def test_heads_chosen_by_a_score(folder):
    how = ['--corpus', 'own.txt', '--score-tokens', '2000']
    for method, share in (('random', '--sparsity=.5'), ('leave_one_out', '--heads=4')):
        said = done(folder, 'score', 'gated', *how, share, '--method', method).stdout
        assert said.count('(') == 4 and 'the 4 of 8 heads to remove' in said
    chosen = [*how, '--heads', '4', '--method', 'gradient', '--repair', 'least_squares']
    said = done(folder, 'prune', 'gated', *PRUNING, *chosen, '--run-dir', 'x', '--control').stdout
    keep = json.loads((folder/'x'/'pruned'/'keep.json').read_text())
    assert '| pruned | 4 of 8 |' in said and sum(map(sum, keep)) == 4 and report(folder, 'x')['keep'] == keep
    shutil.rmtree(folder/'x'/'pruned') # trained again from its checkpoint
    again = done(folder, 'prune', '--resume', '--run-dir', 'x', '--control').stdout
    assert [row[3] for row in rows(again)] == [row[3] for row in rows(said)]
    assert report(folder, 'x')['recipe']['method'] == 'gradient' and "method='gradient'" in (folder/'x'/'report.md').read_text()

@pytest.mark.parametrize('recipe,wish,kept,said', [
    ('tiny', '', None, dict(method='gates', lam=.1)),
    ('tiny', '--heads 3', 3, dict(method='gates', sparsity=.625)),
    ('best', '--sparsity .5', 4, dict(method='leave_one_out', sparsity=.5)),
    ('best', '--method random', 5, dict(method='random', sparsity=.4))])
def test_options_change_single_settings_of_a_recipe(folder, recipe, wish, kept, said):
    start = ['prune', 'good', '--recipe', recipe, *SHORT, '--corpus', 'own.txt', '--score-tokens', '2000']
    table = done(folder, *start, *wish.split(), '--run-dir', 'x').stdout
    assert (kept is None or f'| pruned | {kept} of 8 |' in table) and said.items() <= report(folder, 'x')['recipe'].items()

def test_a_model_brings_its_recipe_and_its_text(folder):
    own = ['best', *TOY, '--sparsity', '.4', '--corpus', 'own.txt', '--score-tokens', '2000', '--run-dir', 'b']
    done(folder, 'train', *own)
    for model in ('b', 'b/baseline'):
        said = done(folder, 'score', model, '--method', 'random')
        assert 'symbols of own' in said.stdout and said.stderr == ''
    done(folder, 'prune', 'b', '--sparsity', '.5', '--run-dir', 'half')
    recipe = report(folder, 'half')['recipe']
    assert (recipe['method'], recipe['sparsity'], recipe['corpus']) == ('leave_one_out', .5, 'own.txt')
    (folder/'own.txt').rename(folder/'away.txt') # not silently another one
    assert 'corpus=own.txt: no such file' in command('evaluate', 'half', cwd=folder).stderr

def test_the_folder_of_a_run_is_its_pruned_model_or_its_baseline(folder):
    done(folder, *PRUNE, '--eval-tokens', '100', '--run-dir', 'r')
    rows = {r['model']: r for r in report(folder, 'r')['rows']}
    for name in ('gated', 'pruned', 'baseline'):
        said = done(folder, 'evaluate', f'r/{name}', '--split', 'test', '--tokens', '100').stdout
        assert f"{rows[name]['test']:.4f} bits" in said and 'over 99 symbols' in said # as in the report
        if name != 'gated': assert done(folder, 'evaluate', 'r', '--split', 'test', '--tokens', '100').stdout == said
        if name == 'pruned': shutil.rmtree(folder/'r'/'pruned')
    assert 'over 99 symbols' not in done(folder, 'evaluate', 'r', '--batch', '4').stdout

def test_sample(folder):
    def said(*args): return done(folder, 'sample', 'tiny-books', '--n', '40', *args).stdout
    first = said('--prompt', 'the sea ')
    assert len(first) == 8 + 40 + 1 and first.startswith('the sea ') and set(first) <= set(' abcdefghijklmnopqrstuvwxyz\n')
    assert said('--prompt', 'the sea ') == first != said('--prompt', 'the sea ', '--seed', '1')
    assert said('--prompt', 'The Sea. ') == first and said('--prompt', '7 seas').startswith(' seven seas') # read like a text
    assert said('--temperature', '0') == said('--temperature', '0', '--seed', '3') == said('--top-k', '1')

def test_a_model_saved_in_python(folder):
    LM.from_pretrained('tiny-books-pruned').save_pretrained(folder/'mine') # with its vocabulary
    assert done(folder, 'sample', 'mine', '--n', '9').stdout == done(folder, 'sample', 'tiny-books-pruned', '--n', '9').stdout

def test_numbers_are_checked_before_anything_is_loaded(folder):
    for job, words in dict(evaluate=['tokens=-9', 'batch=0', 'batch=-2'], score=['score-tokens=-9', 'score-tokens=0', 'sparsity=1.5', 'heads=-1'],
                           sample=['n=-5', 'top-k=-3', 'temperature=nan', 'temperature=-1', 'seed=-1']).items():
        for word in words:
            end = command(job, 'good', f'--{word}', cwd=folder)
            name, _, x = word.partition('=')
            assert end.returncode == 2 and end.stderr.startswith(f"allatt-prune: error: {name.replace('-', '_')}={x}") and end.stderr.count('\n') == 1
    for split in ('tset', 'vocab'): assert "invalid choice: '" in command('evaluate', 'good', '--split', split, cwd=folder).stderr

def test_gates_that_are_closed(folder):
    gates = HeadGates(2, 4)
    gates.log_alpha.data[0] = -5
    config, parts = checkpoint.load(folder/'good')
    checkpoint.save(folder/'closed', config, **parts, gates=gates.state_dict(), z=dict(z=gates.eval()()))
    assert done(folder, 'score', 'closed', '--corpus', 'own.txt', '--method', 'magnitude', '--heads', '3').stdout.count('(-inf)') == 4
    assert 'more is closed already' in command('score', 'closed', '--corpus', 'own.txt', '--heads', '5', cwd=folder).stderr
    assert 'closed gates' in command('prune', 'closed', *PRUNING, '--corpus', 'own.txt', cwd=folder).stderr

def test_what_a_resumed_run_is_not_asked(folder):
    done(folder, 'train', *OWN[1:], '--run-dir', 't')
    for words in (['run', 'wt103'], ['prune', 'good']):
        end = command(*words, '--resume', '--run-dir', 't', cwd=folder)
        assert end.returncode == 2 and f'{words[1]}: leave it out' in end.stderr
    for job in (['run'], ['evaluate', 'good'], ['score', 'good']): assert 'corpus: empty' in command(*job, '--corpus', '', cwd=folder).stderr

def test_a_model_of_another_run_is_not_taken_over(folder):
    for name, seed in (('a', '0'), ('b', '1')): done(folder, *OWN, '--run-dir', name, '--seed', seed, '--save-every', '4')
    for model in ('baseline', 'gated', 'control'):
        shutil.copytree(folder/'a', folder/f'a-{model}')
        (folder/f'a-{model}'/'report.json').unlink()
        shutil.rmtree(folder/f'a-{model}'/model), shutil.copytree(folder/'b'/model, folder/f'a-{model}'/model)
        end = command('run', '--resume', '--run-dir', f'a-{model}', cwd=folder)
        assert end.returncode and 'seed=0' in end.stderr and 'was made with 1' in end.stderr, model

def test_control_characters_of_a_stranger(folder):
    config, parts = checkpoint.load('tiny-books')
    parts['vocab']['symbols'][5] = '\x1b]0;owned\x07'
    checkpoint.save(folder/'escape', config, **parts)
    assert '\x1b' not in done(folder, 'sample', 'escape', '--prompt', 'a ', '--n', '200').stdout
    checkpoint.save(folder/'short', config, **parts | dict(vocab=dict(unit='char', symbols=['a'])))
    assert 'is damaged (number of symbols)' in command('sample', 'short', cwd=folder).stderr

def test_without_standard_output(folder):
    end = subprocess.run([sys.executable, '-m', 'allatt_prune', 'evaluate', 'good', '--corpus', 'own.txt'], cwd=folder, stderr=subprocess.PIPE, text=True,
                         preexec_fn=lambda: os.close(1), timeout=300)
    assert 'Traceback' not in end.stderr and end.returncode == 0

def test_time(folder):
    small = '--n-layer 2 --d-model 32 --n-head 4 --n-persistent 16 --seg-len 16 --batch 4 --corpus own.txt'.split()
    for mem_len in ('0', '40'):
        table = rows(done(folder, 'time', 'tiny', *small, '--mem-len', mem_len).stdout)
        assert [row[:2] for row in table] == [['train', '8'], ['read', '8'], ['train', '4'], ['read', '4']]

def test_words_with_an_adaptive_softmax(folder):
    assert '| perplexity of test text |' in done(folder, *OWN, '--unit', 'word', '--cutoffs', '3,6,4000', '--run-dir', 'w').stdout
    assert json.loads((folder/'w'/'pruned'/'config.json').read_text())['cutoffs'] == [3, 6]
    again = done(folder, 'evaluate', 'w', '--split', 'test').stdout
    row = next(r for r in report(folder, 'w')['rows'] if r['model'] == 'pruned')
    assert f"perplexity {row['test']:.2f} (" in again and f"over {row['tokens'][1]:,} symbols" in again
    assert done(folder, 'sample', 'w', '--prompt', 'one two', '--n', '1').stdout.startswith('one two ')

def test_help_names_every_score(tmp_path):
    from allatt_prune.importance import METHODS
    words = {*re.findall(r'\w+', done(tmp_path, 'score', '--help').stdout.partition('--method str')[2].partition('(default')[0])}
    assert words == {*METHODS, 'or'}
