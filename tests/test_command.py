"The real command, in its own process: what it refuses, what it leaves behind, how it ends."
import json, os, signal, subprocess, sys, time
import pytest
from allatt_prune.cli import main

TOY = ('--n-layer 2 --d-model 32 --n-head 4 --n-persistent 16 --seg-len 16 --mem-len 16 --batch 4 --log-every 5 --steps 12 --warmup 2 '
       '--prune-steps 12 --prune-warmup 2 --lam-warmup 2 --gate-steps 6 --gate-lr 0.3 --lam 0.5').split()
RHYME = 'one two buckle my shoe three four knock at the door '

def command(*args, cwd, **kw): return subprocess.run([sys.executable, '-m', 'allatt_prune', *args], cwd=cwd, capture_output=True, text=True, timeout=300, **kw)

@pytest.fixture(scope='session')
def cache(tmp_path_factory): return tmp_path_factory.mktemp('cache')

@pytest.fixture
def folder(tmp_path, cache, monkeypatch):
    monkeypatch.setenv('ALLATT_PRUNE_CACHE', str(cache))
    (tmp_path/'own.txt').write_text(RHYME * 60)
    (tmp_path/'short.txt').write_text(RHYME)
    (tmp_path/'blank.txt').write_text(' \n')
    (tmp_path/'latin.txt').write_bytes('café '.encode('latin-1') * 500)
    (tmp_path/'taken').mkdir()
    (tmp_path/'taken'/'result').write_text('precious')
    return tmp_path

def state(folder): return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob('*')}

REFUSED = [ # arguments, exit status, what the line must name
    ('--corpus wikipedia', 2, 'corpus=wikipedia'),
    ('--corpus no/such.txt', 1, 'corpus=no/such.txt'),
    ('--corpus taken', 1, 'corpus=taken'),
    ('--corpus blank.txt', 1, 'corpus=blank.txt'),
    ('--corpus latin.txt', 1, 'byte 3'),
    ('--corpus short.txt', 1, 'corpus=short.txt'),
    ('--recipe huge', 2, 'recipe=huge'),
    ('--lamda 0.2', 2, 'did you mean lam'),
    ('--n-head 7', 2, 'n_head=7'),
    ('--n-head 0', 2, 'n_head=0'),
    ('--steps ten', 2, 'steps=ten'),
    ('--steps', 2, '--steps'),
    ('--lr nan', 2, 'lr=nan'),
    ('--lam -1', 2, 'lam=-1'),
    ('--gate-init inf', 2, 'gate_init=inf'),
    ('--dropout 1', 2, 'dropout=1'),
    ('--optimizer sgd', 2, 'optimizer=sgd'),
    ('--cutoffs 9,5', 2, 'cutoffs=(9, 5)'),
    ('--cutoffs many', 2, 'cutoffs=many'),
    ('--unit line', 2, 'unit=line'),
    ('--output-scale maybe', 2, 'output_scale=maybe'),
    ('--gate-steps 9999', 2, 'gate_steps=9999'),
    ('--seed 99999999999999999999', 2, 'seed='),
    ('--lr 1e38', 2, 'lr=1e+38'),
    ('--mem-len 900', 1, 'corpus=own.txt'),
    ('--', 2, 'argument=--'),
    ('--device meta', 2, 'device=meta'),
    ('--device abacus', 2, 'device=abacus'),
    ('--device cuda:99', 2, 'device=cuda:99'),
    ('--run-dir taken', 1, 'run_dir=taken'),
    ('--run-dir own.txt', 1, 'run_dir=own.txt'),
    ('--run-dir own.txt/below', 1, 'run_dir=own.txt/below'),
    ('surplus', 2, 'surplus'),
]

@pytest.mark.parametrize('args,status,named', REFUSED, ids=[a for a, *_ in REFUSED])
def test_refused_in_one_line_and_nothing_written(folder, monkeypatch, capfd, args, status, named): # in this process, which has torch loaded already
    before = state(folder)
    corpus = [] if '--corpus' in args else ['--corpus', 'own.txt']
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end: main(['run', *TOY, *corpus, *args.split()])
    out, err = capfd.readouterr()
    lines = err.strip().splitlines()
    assert end.value.code == status, err
    assert len(lines) == 1 and lines[0].startswith('allatt-prune: error: ') and named in lines[0], err
    assert out == '' and state(folder) == before

def test_debug_shows_the_traceback(folder):
    done = command('run', '--recipe', 'huge', '--debug', cwd=folder)
    assert done.returncode != 0 and 'Traceback' in done.stderr

def test_refused_by_the_process_itself(folder):
    done = command('run', '--recipe', 'huge', cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1) and done.stderr.startswith('allatt-prune: error: recipe=huge')

def test_without_a_command(folder):
    done = command(cwd=folder)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1

def test_run_twice_gives_the_same_model_and_never_overwrites(folder):
    for name in ('a', 'b'):
        done = command('run', *TOY, '--corpus', 'own.txt', '--run-dir', name, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count('\n') == 8 and done.stdout.startswith('| | heads kept') and done.stdout.endswith(f'report: {name}/report.md\n')
    for f in ('baseline', 'control', 'gated', 'pruned'):
        assert (folder/'a'/f/'model.safetensors').read_bytes() == (folder/'b'/f/'model.safetensors').read_bytes()
    before = state(folder)
    assert command('run', *TOY, '--corpus', 'own.txt', '--run-dir', 'a', cwd=folder).returncode == 1
    assert state(folder) == before
    strict = lambda text: json.loads(text, parse_constant=pytest.fail)        # no NaN or Infinity, which are not JSON
    assert strict((folder/'a'/'report.json').read_text())['rows'][2]['model'] == 'pruned'
    assert [strict(line)['step'] for line in (folder/'a'/'metrics.jsonl').read_text().splitlines()] == [0, 5, 10, 11] * 3

def test_words_with_an_adaptive_softmax(folder):
    done = command('run', *TOY, '--corpus', 'own.txt', '--unit', 'word', '--cutoffs', '3,6,4000', '--run-dir', 'w', cwd=folder)
    assert done.returncode == 0, done.stderr
    assert 'valid ppl | test ppl' in done.stdout
    report = json.loads((folder/'w'/'report.json').read_text())
    assert report['unit'] == 'word' and report['tokens'] == [len(RHYME.split()) * 60 // 20 - 1] * 2
    assert json.loads((folder/'w'/'pruned'/'config.json').read_text())['cutoffs'] == [3, 6]
    again = command('evaluate', 'w/pruned', '--corpus', 'own.txt', '--unit', 'word', '--split', 'test', cwd=folder)
    row = next(r for r in report['rows'] if r['model'] == 'pruned')
    assert f"perplexity {row['test']:.2f} over {report['tokens'][1]:,} tokens" in again.stdout, again.stderr

def test_every_head_may_go(folder):
    done = command('run', *TOY, '--corpus', 'own.txt', '--run-dir', 'none', '--lam', '50', '--gate-lr', '5', '--lam-warmup', '0', cwd=folder)
    assert done.returncode == 0, done.stderr
    assert '| pruned | 0 of 8 |' in done.stdout

def test_interrupt(folder):
    job = subprocess.Popen([sys.executable, '-m', 'allatt_prune', 'run', *TOY, '--steps', '100000', '--corpus', 'own.txt', '--run-dir', 'x'],
                           cwd=folder, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if (folder/'x'/'metrics.jsonl').exists(): break
        time.sleep(.1)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130 and err.strip().splitlines()[-1] == 'allatt-prune: error: interrupted', err
