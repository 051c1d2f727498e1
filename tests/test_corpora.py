"Corpora from a real HTTP server, from damaged files and from damaged caches: what is refused, and what is left."
import gzip, hashlib, io, json, logging, lzma, os, pickle, random, shutil, signal, subprocess, sys, tempfile, threading, time, warnings, zipfile
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
import numpy as np, pooch, pytest
from hypothesis import given, settings, strategies as st
from allatt_prune.config import get_recipe
from allatt_prune.data import UNKNOWN, Corpus, DataError, Ids, vocab_hash
from allatt_prune.engine.text import from_text, from_texts, normalize
from allatt_prune.engine import checkpoint, corpora
from allatt_prune.engine.corpora import blocks, load_corpus
from allatt_prune.engine.run import text_for
from allatt_prune import LM, LMConfig
from allatt_prune.training import evaluate, train

SPLITS = 'train', 'valid', 'test'
def paragraphs(split, n):
    return ''.join(f' \n = {split} {i} = \n \n the <unk> of {split} number {i} , and the rest . \n' for i in range(n))
TEXTS = dict(train=paragraphs('train', 300) + 'valid test\n', valid=paragraphs('valid', 30), test=paragraphs('test', 40))
TEXT = 'one two buckle my shoe\nthree four knock at the door\n' * 40
HTML = b'<!DOCTYPE html><html><body>Please log in to this network</body></html>'

def zipped(members): # a zip file with these names and texts
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w', zipfile.ZIP_DEFLATED) as z:
        for name, text in members.items(): z.writestr(name, text)
    return out.getvalue()

def wiki(texts): return zipped({f'wikitext-2/wiki.{s}.tokens': t for s, t in texts.items()} | {'../evil': 'x', '/tmp/evil': 'x'})
GOOD = wiki(TEXTS)

class Server(ThreadingHTTPServer):
    "Answers with `body` up to `cut`, and goes on after a pause if there is one; `length`: does it say how long that is?"
    daemon_threads = True
    def __init__(self):
        super().__init__(('127.0.0.1', 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
    def answer(self, body, cut=None, length=True, pause=0, status=200):
        self.body, self.cut, self.length, self.pause, self.status, self.requests = body, cut, length, pause, status, 0

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        s = self.server
        s.requests += 1
        refused = self.headers.get('User-Agent', '').lower().startswith('python')
        self.send_response(403 if refused else s.status)
        if s.length: self.send_header('Content-Length', str(len(s.body)))
        self.end_headers()
        try:
            self.wfile.write(s.body[:s.cut])
            time.sleep(s.pause)
            if s.cut is None or s.pause: self.wfile.write(s.body[s.cut or len(s.body):])
        except OSError: pass

@pytest.fixture(scope='module')
def server():
    s = Server()
    yield s
    s.shutdown()

def row(server, name, body, *members): # of SOURCES, for that body
    return f'http://127.0.0.1:{server.server_port}/{name}', hashlib.sha256(body).hexdigest(), members

def wiki_row(server): return row(server, 'wikitext-2-v1.zip', GOOD, *(f'wikitext-2/wiki.{s}.tokens' for s in SPLITS))

@pytest.fixture
def home(tmp_path, monkeypatch, server): # an empty cache; wikitext-2 comes from the local server
    server.answer(GOOD)
    monkeypatch.setenv('ALLATT_PRUNE_CACHE', str(tmp_path/'cache'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(corpora.SOURCES, 'wikitext-2', wiki_row(server))
    return tmp_path

def made(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

def state(folder): # all files but the lock
    files = (p for p in sorted(folder.rglob('*')) if p.is_file() and p.name != 'lock')
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}

def refused(name, *said, error=DataError, **how): # with these words, and everything is left as it was
    before = state(Path.cwd())
    with pytest.raises(error) as e: load_corpus(name, **how)
    for what in said: assert what in str(e.value)
    assert state(Path.cwd()) == before

def obvious(text): return [w for line in text.split('\n')[:-1] for w in line.split() + ['<eos>']]
def whole(c): return c.decode(np.concatenate([c.train, c.valid, c.test]))

def same(a, b): # the same vocabulary, and the same ids of the same type
    assert (a.vocab, a.unit, a.hash) == (b.vocab, b.unit, b.hash)
    for s in SPLITS:
        assert getattr(a, s).dtype == getattr(b, s).dtype and getattr(a, s).tolist() == getattr(b, s).tolist()

def is_wikitext(corpus):
    words = {s: obvious(t) for s, t in TEXTS.items()}
    known = {s: [w if w in set(words['train']) else '<unk>' for w in words[s]] for s in SPLITS}
    assert {s: corpus.decode(getattr(corpus, s)).split() for s in SPLITS} == known
    assert corpus.vocab == [w for w, _ in Counter(words['train']).most_common()] and corpus.unit == 'word'

# ---- from the net

def test_download(home, server):
    is_wikitext(load_corpus('wikitext-2'))
    assert server.requests == 1
    assert [p.name for p in (home/'cache'/'wikitext-2').iterdir()] == ['wikitext-2-v1.zip']    # nothing was unpacked
    assert not list(home.rglob('evil')) and not Path('/tmp/evil').exists()

@pytest.mark.parametrize('there,requests', ((GOOD, 0), (GOOD[:1000], 1)), ids=('whole', 'damaged'))
def test_an_archive_that_is_there(home, server, there, requests):
    made('cache/wikitext-2/wikitext-2-v1.zip', there)
    is_wikitext(load_corpus('wikitext-2'))
    assert server.requests == requests

@pytest.mark.parametrize('length', (True, False), ids=('length', 'no-length'))
@pytest.mark.parametrize('tenth', (0, 5))
def test_a_connection_cut(home, server, tenth, length):
    made('precious.txt', 'to be or not to be ' * 100)
    load_corpus('precious.txt')
    server.answer(GOOD, cut=tenth * len(GOOD) // 10, length=length)
    refused('wikitext-2', 'corpus=wikitext-2', '127.0.0.1', 'put the file into')
    server.answer(GOOD)
    is_wikitext(load_corpus('wikitext-2'))

@pytest.mark.parametrize('answer,said', [
    (dict(body=GOOD[:-1] + b'x'), 'does not match'), (dict(body=b''), 'does not match'),
    (dict(body=HTML, status=404), '404'), (dict(body=HTML, status=500), '500')], ids=('hash', 'empty', '404', '500'))
def test_something_else_comes(home, server, answer, said):
    server.answer(**answer)
    refused('wikitext-2', 'corpus=wikitext-2', said, 'put the file into')

# ---- several processes, and killed ones

def process(home, server): # the command, in its own process, with the local server
    small = '--n-layer 1 --d-model 16 --n-head 2 --n-persistent 4 --seg-len 8 --mem-len 8 --batch 1'
    code = (f'import allatt_prune.engine.corpora as c; c.SOURCES["wikitext-2"] = {wiki_row(server)!r}\n'
            f'import sys; sys.argv[1:] = "time --corpus wikitext-2 {small}".split()\n'
            'from allatt_prune.engine.cli import main; main()')
    return subprocess.Popen([sys.executable, '-c', code], cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def test_several_processes_download_once(home, server):
    server.answer(GOOD, cut=len(GOOD)//2, pause=3)
    jobs = [process(home, server) for _ in range(2)]
    done = [j.communicate(timeout=120) for j in jobs]
    assert [j.returncode for j in jobs] == [0]*2, done
    is_wikitext(load_corpus('wikitext-2'))
    assert server.requests == 1

@pytest.mark.parametrize('module,doing', ((pooch, 'retrieve'), (corpora, 'write_file')))
def test_killed(home, module, doing):
    made('cache/wikitext-2/wikitext-2-v1.zip', GOOD)
    if not (pid := os.fork()):
        setattr(module, doing, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        load_corpus('wikitext-2')
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert bool([*home.rglob('*.tmp-*')]) == (doing == 'write_file')                                # the dead cannot clean up
    is_wikitext(load_corpus('wikitext-2'))
    assert not [*home.rglob('*.tmp-*')]

# ---- damaged caches

def stored(home): # the folder of the only corpus
    folder, = (p for p in (home/'cache'/'prepared').iterdir() if '.' not in p.name)
    return folder

def rebuilt(home): # damage is noticed, said, and mended; the damaged folder
    before = {*home.rglob('*.damaged-*')}
    with pytest.warns(UserWarning, match='damaged; set aside, and prepared again'): is_wikitext(load_corpus('wikitext-2'))
    aside, = {*home.rglob('*.damaged-*')} - before
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        is_wikitext(load_corpus('wikitext-2'))
    return aside

@pytest.mark.parametrize('file', ('train.npy', 'corpus.json', 'manifest.json'))
def test_a_damaged_cache_is_made_again(home, file):
    load_corpus('wikitext-2')
    path, rng = stored(home)/file, random.Random(0)
    good = path.read_bytes()
    damaged = [None, b'', good[:len(good)//4*2]]
    if file == 'train.npy':
        damaged += [good[:-150] + bytes(100) + good[-50:], (path.parent/'valid.npy').read_bytes()]
        damaged += [good.replace(*swap) for swap in ((b'<u2', b'<i2'), (b'<u2', b'>u2'), (b'<u2', b'|O8'), (b'False', b'True '))]
        damaged += [good.replace(b'(%d,)' % n, b'(%d,)' % m) for n in (len(np.load(path)),) for m in (n - 1, n + 1)]
        assert len({*damaged}) == len(damaged) and good not in damaged
        path.unlink(), os.mkfifo(path), rebuilt(home)                                          # does not hang
    for at in [8, 20, *rng.sample(range(len(good)), 4)] if file != 'manifest.json' else []:    # 8: length of the header
        damaged.append(good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at+1:])   # one bit
    for bad in damaged:
        path.unlink() if bad is None else path.write_bytes(bad)
        rebuilt(home)
        assert path.read_bytes() == good

def test_what_others_put_there_is_kept(home):
    load_corpus('wikitext-2')
    folder = stored(home)
    made(folder/'train.npy', b''), made(folder/'notes.txt', 'precious')
    assert (rebuilt(home)/'notes.txt').read_text() == 'precious'
    os.rename(folder, home/'away'), made('away/train.npy', 'precious'), folder.symlink_to(home/'away')
    assert rebuilt(home).is_symlink() and (home/'away'/'train.npy').read_text() == 'precious'
    shutil.rmtree(folder), made(folder, 'precious')
    assert rebuilt(home).read_text() == 'precious'

class Nobody:
    "A user who owns nothing here."
    def __enter__(self):
        if os.getuid() == 0: os.setegid(65534), os.seteuid(65534)
    def __exit__(self, *_):
        if os.getuid() == 0: os.seteuid(0), os.setegid(0)

def test_a_cache_that_cannot_be_written():
    home = Path(tempfile.mkdtemp())
    made(home/'a.txt', TEXT), made(home/'b.txt', TEXT[::-1])
    first = load_corpus(home/'a.txt', home/'cache')
    for p in (home, home/'cache', home/'cache'/'prepared'): p.chmod(0o555)
    with Nobody():
        same(load_corpus(home/'a.txt', home/'cache'), first)
        with pytest.raises(DataError, match='b.txt: .*Permission denied.*cache.*give another text or cache'): load_corpus(home/'b.txt', home/'cache')
    for p in (home, home/'cache', home/'cache'/'prepared'): p.chmod(0o755)
    shutil.rmtree(home)

def test_prepared_folders_that_are_swapped_or_of_another_form(home):
    made('a.txt', TEXT), made('b.txt', TEXT[::-1])
    a, b = whole(load_corpus('a.txt')), whole(load_corpus('b.txt'))
    one, two = sorted((home/'cache'/'prepared').iterdir())
    one.rename(home/'x'), two.rename(one), (home/'x').rename(two)
    with pytest.warns(UserWarning, match='damaged; set aside'): assert (whole(load_corpus('a.txt')), whole(load_corpus('b.txt'))) == (a, b)
    for lost in ('sha256', 'unit', 'key'):
        for folder in (f for f in (home/'cache'/'prepared').iterdir() if '.' not in f.name):
            about = json.loads((folder/'corpus.json').read_text())
            del about[lost]
            (folder/'corpus.json').write_text(json.dumps(about)), checkpoint.seal(folder, sorted(f.name for f in folder.iterdir() if f.name != 'manifest.json'))
        with pytest.warns(UserWarning, match='damaged; set aside'): assert whole(load_corpus('a.txt')) == a

def test_a_text_that_changes_while_it_is_read(home, monkeypatch):
    made('a.txt', TEXT)
    def changing(path, size):
        yield TEXT
        made('a.txt', TEXT.upper())
    with monkeypatch.context() as m:
        m.setattr(corpora, 'blocks', changing)
        with pytest.raises(DataError, match='corpus=a.txt: changed'): load_corpus('a.txt', unit='raw')
        m.setattr(corpora, 'blocks', lambda path, size: path.unlink() or blocks(path, size))
        with pytest.raises(DataError, match="corpus=a.txt: .*No such file.*a.txt"): load_corpus('a.txt', unit='raw')
    assert not [*(home/'cache').glob('prepared/*')]

# ---- files and folders of one's own

BAD = [ # what is there, the corpus that is asked for, what the message must say
    ({'a.txt': TEXT.encode() + b'caf\xe9'}, 'a.txt', 'Latin-1: iconv -f LATIN1 -t UTF-8'),
    ({'a.txt': b'\xff\xfea\0b\0'}, 'a.txt', 'cannot be read as UTF-8'),
    ({}, 'none', 'corpus=none: no such file, no folder with .txt or .md files, nor one of pydocs, wikitext-103'),
    ({'d/e': TEXT}, 'd', 'unit raw also reads a folder of code'),
    ({'d/train.txt': TEXT, 'd/test.txt': TEXT}, 'd', 'no valid.txt'),
    ({'a.txt.xz': lzma.compress(TEXT.encode())[:-9]}, 'a.txt.xz', 'cannot be read'),
    ({'a.txt': TEXT.encode('utf-16')}, 'a.txt', 'this is UTF-16: iconv -f UTF-16 -t UTF-8'),
    ({'a.txt': TEXT.encode('utf-16-le')}, 'a.txt', 'NUL'),                                     # no byte order mark: valid UTF-8
    ({'a.txt.gz': gzip.compress(TEXT.encode())}, 'a.txt.gz', 'give UTF-8, unpacked; this is gzip'),
    ({'d/a.txt': TEXT, 'd/b.txt': b'a\0b'}, 'd', 'b.txt: cannot be read'),
    ({'a.txt': ''}, 'a.txt', 'train 0, valid 0, test 0 symbols'),
    ({'a.txt': 'abcdefghij' * 2}, 'a.txt', 'train 18, valid 1, test 1 symbols'),
    ({'d/train.txt': TEXT, 'd/valid.txt': 'x', 'd/test.txt': TEXT}, 'd', ', valid 1, '),
    ({'d/train.txt': '', 'd/valid.txt': TEXT, 'd/test.txt': TEXT}, 'd', 'd: train 0, '),
    ({'a.txt': '漢字' * 99}, 'a.txt', 'symbols of unit=char; give more text'),
    ({'d/train.txt': TEXT, 'd/a.txt': TEXT}, 'd', 'no valid.txt there'),
]
@pytest.mark.parametrize('files,name,said', BAD, ids=range(len(BAD)))
def test_a_text_that_cannot_be_used(home, files, name, said):
    load_corpus('wikitext-2')                                                                 # a cache to be kept
    for path, content in files.items(): made(path, content)
    refused(name, said)

@pytest.mark.parametrize('end', ('', '.xz'))
def test_packed_or_not_in_a_folder_or_alone(home, end):
    pack = {'': bytes, '.xz': lzma.compress}[end]
    for s in SPLITS:
        for name in (f'w/wiki.{s}.tokens{end}', f't/{s}.txt{end}'): made(name, pack(TEXTS[s].encode()))
    made(f'alone{end}', pack(TEXT.encode()))
    is_wikitext(load_corpus('w'))
    is_wikitext(load_corpus('t', unit='word'))
    chars, raw = load_corpus('t'), load_corpus('t', unit='raw')
    assert chars.decode(chars.valid) == normalize(TEXTS['valid']) and raw.decode(raw.valid) == TEXTS['valid']
    same(load_corpus(f'alone{end}', unit='raw'), from_text(TEXT, 'raw'))

@pytest.mark.filterwarnings('ignore:.*left out')
def test_books(home):
    made('books/Persuasion.md', '# Persuasion\n\nVanity: Sir *Walter* Elliot, of Kellynch Hall, in 1818.' * 3)
    made('books/deep/Emma.txt', 'Emma — handsome,\nclever, and rich; three volumes.\n' * 3)
    made('books/cover.png', b'\x89PNG\xff')
    chars, words = load_corpus('books'), load_corpus('books', unit='word')
    texts = ['persuasion vanity sir walter elliot of kellynch hall in one eight one eight ' * 3, 'emma handsome clever and rich three volumes ' * 3]
    assert whole(chars).strip() in [(a + b).strip() for a, b in (texts, texts[::-1])] and '  ' not in whole(chars)
    lines = [obvious(p.read_text().removesuffix('\n') + '\n') for p in (Path('books/Persuasion.md'), Path('books/deep/Emma.txt'))]
    assert whole(words).split() in [a + b for a, b in (lines, lines[::-1])]
    made('books/empty.md', '--- 漢字 ---'), made('books/._Emma.txt', b'\xff')
    with pytest.warns(UserWarning, match='letters are outside a-z'):
        assert whole(load_corpus('books')).split() == whole(chars).split() and '  ' not in whole(load_corpus('books'))
    made('books/bad.txt', b'\xff')
    refused('books', 'books/bad.txt: cannot be read')

def test_a_changed_file_is_prepared_again_and_no_other(home, monkeypatch):
    made('a.txt', TEXT)
    first = load_corpus('a.txt')
    with monkeypatch.context() as m:
        m.setattr(corpora, 'blocks', pytest.fail)
        same(load_corpus('a.txt'), first)
        os.rename('a.txt', 'b.txt')                                                  # moved, and touched
        os.utime('b.txt', (0, 0))
        same(load_corpus('b.txt'), first)
    made('a.txt', TEXT.replace('door', 'gate'))                                      # of the same length
    os.utime('a.txt', (0, 0))                                                        # and time
    same(load_corpus('a.txt'), from_text(TEXT.replace('door', 'gate')))
    made('d/train.txt', TEXT), made('d/valid.txt', TEXT.upper()), made('d/test.txt', 'one two ' * 9)
    three = load_corpus('d', unit='raw')
    os.rename('d/valid.txt', 'x'), os.rename('d/train.txt', 'd/valid.txt'), os.rename('x', 'd/train.txt')
    assert load_corpus('d', unit='raw').decode(range(3)) != three.decode(range(3))   # the parts changed places

def told(name, **how): # corpus, warnings and log lines
    with warnings.catch_warnings(record=True) as said, pytest.MonkeyPatch.context() as m:
        warnings.simplefilter('always')
        m.setattr(logging.getLogger('allatt_prune'), 'info', lambda line: said.append(line))
        corpus = load_corpus(name, **how)
    return corpus, [str(w.message) for w in said if not isinstance(w, str)], [w for w in said if isinstance(w, str)]

@pytest.mark.filterwarnings('ignore:.*left out')
def test_files_left_out_are_told(home):
    made('d/a.txt', TEXT), made('d/sub/b.MD', TEXT), made('d/empty.txt', '')
    for junk in ('.hidden.rst', '._a.txt', '.git/config.txt', '__pycache__/a.pyc', 'sub/Thumbs.db'): made(f'd/{junk}', b'\xff')
    for _ in range(2): # prepared, and opened
        corpus, warned, logged = told('d')
        assert len(whole(corpus)) == 2*len(normalize(TEXT)) and not warned and logged == ['corpus=d: 3 files read, 0 left out']
    made('d/sub/c.rst', TEXT), made('d/LICENSE', TEXT), made('d/logo.png', b'\x89PNG\r\n\x1a\n\0'), made('else/x.txt', TEXT)
    os.mkfifo('d/pipe.txt'), Path('d/link').symlink_to(home/'else'), Path('d/up').symlink_to('.')
    for _ in range(2):
        (message,) = told('d')[1]
        assert message.startswith('corpus=d: 3 files read, 6 left out (.png .rst .txt LICENSE link up); give UTF-8 .txt or .md')
    raw, warned, _ = told('d', unit='raw')
    assert len(whole(raw)) == 4*len(TEXT) and warned[0].startswith('corpus=d: 5 files read, 4 left out (.png .txt link up)')
    Path('d/linked.txt').symlink_to(home/'else'/'x.txt')                                      # a linked file is read
    assert len(whole(load_corpus('d'))) == 3*len(normalize(TEXT))
    made(Path(os.fsdecode(b'd/caf\xe9.txt')), TEXT)                                           # its name is not UTF-8
    assert len(whole(load_corpus('d'))) == 4*len(normalize(TEXT))
    made(Path(os.fsdecode(b'd/caf\xe9.b\xe9')), TEXT)
    assert '.b\udce9' in told('d')[1][0]

@pytest.mark.parametrize('unit', ('char', 'raw'))
@pytest.mark.parametrize('target', ('gone', 'loop.txt'))
def test_a_link_that_leads_nowhere(home, unit, target):
    made('d/a.txt', TEXT), Path('d/loop.txt').symlink_to(target)
    with pytest.raises(DataError, match='corpus=d: .*loop.txt'): load_corpus('d', unit=unit)

@pytest.mark.parametrize('unit', ('char', 'raw'))
@pytest.mark.parametrize('shut', ('t', 't/sub', 't/sub/deep', 't/sub/b.txt'))
def test_what_cannot_be_read_is_named(shut, unit):
    home = Path(tempfile.mkdtemp())
    home.chmod(0o755), made(home/'t'/'a.txt', TEXT), made(home/'t'/'sub'/'b.txt', TEXT), made(home/'t'/'sub'/'deep'/'c.txt', TEXT)
    (home/shut).chmod(0)
    with Nobody(), pytest.raises(DataError, match=f'Permission denied.*{shut}'): load_corpus(home/'t', home/'cache', unit)
    (home/shut).chmod(0o755)
    shutil.rmtree(home)

# ---- what becomes of a text that is not plain a-z

@pytest.mark.parametrize('text,lost', [
    ('Größe über alles. ' * 99, 3 / 14), ('Gro\u0308ße, 99 Ä! ' * 99, 3 / 7), ('naïve 123 ²³ – “…” \u2764\ufe0f ' * 99, 1 / 5),
    (TEXT + 'ä', 1 / (1 + sum(map(str.isalpha, TEXT)))), (TEXT * 2 + 'ab12 -!', 0)], ids=range(5))
def test_lost_letters_are_told_at_every_load(home, text, lost):
    made('a.txt', text)
    for _ in range(2): # prepared, and opened
        corpus, warned, logged = told('a.txt')
        assert corpus.lost == pytest.approx(lost)
        messages = [m for m in (warned if lost >= .001 else logged) if f'{100*lost:.3g} % of the letters are outside a-z' in m]
        assert len(messages) == len(warned + logged) == (lost > 0)
    if lost > .001:
        with pytest.warns(UserWarning, match='a.txt: .*outside a-z.*unit=raw'): text_for('tiny-books', 'a.txt')
        with pytest.warns(UserWarning, match='outside a-z'): from_text(text)
    for unit in ('raw', 'word'): assert not told('a.txt', unit=unit)[1] and load_corpus('a.txt', unit=unit).lost == 0

PROSE = 'It was "Emma" who said:\nI have 2 cats, and a dog.\n\n' * 30

def test_a_file_and_a_folder_are_read_alike(home):
    made('a.txt', PROSE), made('d/a.txt', PROSE)
    for unit, text in (('char', normalize(PROSE)), ('raw', PROSE)):
        file, folder = load_corpus('a.txt', unit=unit), load_corpus('d', unit=unit)
        assert whole(file) == text == whole(folder) and file.hash == folder.hash and file.unit == unit

def save_model(name, corpus, **vocab): # a model of that text
    cfg = LMConfig(vocab=len(corpus.vocab), n_layer=1, d_model=8, n_head=2, n_persistent=4, seg_len=8, mem_len=8)
    LM(cfg).save_pretrained(name, vocab=dict(unit=corpus.unit, symbols=corpus.vocab) | vocab)

def test_a_text_is_read_as_the_text_of_the_model_was(home):
    made('a.txt', PROSE), made('d/a.txt', PROSE)
    assert 'z' not in load_corpus('a.txt').vocab                                     # numbered by its own letters
    for name in ('a.txt', 'd'):
        text = text_for('tiny-books', name)
        assert whole(text) == normalize(PROSE) and text.vocab == [' ', *'abcdefghijklmnopqrstuvwxyz']
    for i in range(5): made(f'books/{i}.txt', PROSE + 'More!\nOf this')
    for unit, seen in (('char', normalize(PROSE)), ('word', ' '.join(obvious(PROSE))), ('raw', PROSE)):
        save_model(unit, load_corpus('books', unit=unit))
        for name in ('a.txt', 'd'): assert whole(text_for(unit, name)) == seen, (unit, name)

def test_what_a_model_does_not_know_is_counted(home):
    for split in SPLITS: made(f'd/{split}.txt', ' '.join(['one', 'two', 'pear', '<unk>'] * 500 if split == 'test' else ['one', 'two'] * 500))
    made('m.txt', 'one two three <unk>\n' * 100)
    save_model('m', load_corpus('m.txt', unit='word'))
    text = text_for('m', 'd')
    assert (text.unknown(text.test), text.unknown(text.train)) == (pytest.approx(.5, rel=.01), 0)       # one <eos> more

def test_symbols_without_a_number_are_refused(home):
    made('a.txt', TEXT), made('b.txt', TEXT.replace('knock', 'quack'))
    save_model('m', load_corpus('a.txt'))
    with pytest.raises(DataError, match="corpus=b.txt: the model does not know 'q'"): text_for('m', 'b.txt')

def test_code_is_read_as_it_is(home):
    code = 'def f(x):\n\treturn x**2 # Größe\n'
    made('src/a.py', code), made('src/sub/b.py', code * 50)
    assert whole(load_corpus('src', unit='raw')) == code * 51

def test_ids_outside_the_vocabulary():
    recipe = get_recipe('tiny', n_layer=1, d_model=8, n_head=2, n_persistent=4, seg_len=8, mem_len=8, batch=4, steps=3)
    for wrong in (3, 200, -1):
        ids = np.array([0, 1, 2] * 99, dtype=np.int64)
        model, corpus = LM(recipe.config(3)), Corpus('toy', ids, ids, ids, ['a', 'b', 'c'], 'char')
        train(model, corpus, recipe)
        ids[10] = wrong
        with pytest.raises(IndexError): train(model, corpus, recipe)
        with pytest.raises(ValueError, match='the ids are 0 to 2'): evaluate(model, ids)

def test_ids_know_their_vocabulary(home):
    made('a.txt', TEXT), made('b.txt', TEXT.replace('knock', 'quack'))
    a, b = load_corpus('a.txt'), load_corpus('b.txt')
    assert a.hash != b.hash and load_corpus('a.txt', unit='raw').hash != a.hash
    text, symbols = from_text(TEXT), from_texts([[['one two\n'] * 50]], 'word')
    for c in (a, b, load_corpus('b.txt', vocab=[*' abcdefghijklmnopqrstuvwxyz']), text, symbols):
        assert c.hash == vocab_hash(c.unit, c.vocab)
        for ids in (c.train, c.valid, c.test, c.train[3:-1], c.train[:9][::2], c.train[:9].copy(), c.train.astype(np.int64)):
            assert ids.hash == c.hash
        assert not hasattr(np.asarray(c.train), 'hash') and type(c.train[:4] + 1) is np.ndarray  # numbers, no longer ids
        assert isinstance(c.train.sum(), np.integer) and isinstance(c.train[0], np.integer)
        assert pickle.loads(pickle.dumps(c.train)).hash in (None, c.hash) and np.arange(3).view(Ids).hash is None
    assert isinstance(a.train.base, np.memmap) and a.hash == text.hash                # not read into memory
    swapped = Corpus('', b.train, b.valid, b.test, a.vocab, 'char')                   # a corpus says of which vocabulary they are
    assert (swapped.train.hash, b.train.hash) == (a.hash, b.hash)

# ---- the fast way against the obvious one

alphabet = st.text(st.sampled_from('ab Aé7\n漢\U0001f600.\u3000\t'), min_size=1, max_size=80)

@pytest.mark.filterwarnings('ignore:.*outside a-z')
@settings(max_examples=40, deadline=None)
@given(text=alphabet, before=st.integers(1, 60), unit=st.sampled_from(('char', 'word', 'raw')), size=st.integers(1, 9))
def test_any_text_cut_anywhere(tmp_path_factory, text, before, unit, size):
    folder = tmp_path_factory.mktemp('any')
    (folder/'a.txt').write_text(text := 'x\n' * before + text + 'x\n' * (61 - before), encoding='utf-8')
    with pytest.MonkeyPatch.context() as m:
        m.setattr(corpora, 'blocks', lambda path, block=size: blocks(path, block and size))
        corpus = load_corpus(folder/'a.txt', folder/'cache', unit)
    same(corpus, from_text(text, unit))
    symbols = obvious(text.removesuffix('\n') + '\n') if unit == 'word' else [*(normalize(text) if unit == 'char' else text)]
    counts, odd = Counter(symbols[:len(corpus.train)]), UNKNOWN[unit]
    vocab = [w for w, _ in counts.most_common()] if unit == 'word' else sorted(counts)
    assert corpus.vocab == vocab + [odd] * bool(set(symbols) - {*counts, odd})
    found = np.concatenate([corpus.train, corpus.valid, corpus.test])
    assert [corpus.vocab[i] for i in found] == [x if x in counts else odd for x in symbols]
    assert [len(corpus.train), len(corpus.valid)] == [(i := round(.9 * len(symbols))), round(.95 * len(symbols)) - i]

@pytest.mark.filterwarnings('ignore:.*outside a-z')
@settings(max_examples=20, deadline=None)
@given(train=alphabet, valid=alphabet, test=alphabet)
def test_any_text_in_three_parts(tmp_path_factory, train, valid, test):
    folder = tmp_path_factory.mktemp('any')
    texts = dict(train='x\nx\n' + train, valid=valid + 'x\ny\n', test='y\ny\n' + test)
    for s, t in texts.items(): (folder/f'{s}.txt').write_text(t, encoding='utf-8')
    raw, chars, words = (load_corpus(folder, folder/'cache', u) for u in ('raw', 'char', 'word'))
    assert raw.vocab[:len(set(texts['train']))] == sorted(set(texts['train']))
    line = lambda t: obvious(t if t.endswith('\n') else t + '\n')
    assert [w for w in words.vocab if w != '<unk>'] == [w for w, _ in Counter(line(texts['train'])).most_common()]
    for s, t in texts.items():
        assert raw.decode(getattr(raw, s)) == ''.join(c if c in texts['train'] else '\ufffd' for c in t)
        assert chars.decode(getattr(chars, s)) == ''.join(c if c in normalize(texts['train']) else '\ufffd' for c in normalize(t))
        known = set(line(texts['train']))
        assert words.decode(getattr(words, s)).split() == [w if w in known else '<unk>' for w in line(t)]
