"Corpora from a real HTTP server, from damaged files and from damaged caches: what is refused, and what is left."
import gzip, hashlib, io, lzma, os, random, re, select, shutil, signal, stat, subprocess, sys, threading, time, warnings, zipfile
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from allatt_prune.engine import checkpoint, corpora
from allatt_prune.engine.cli import main
from allatt_prune.engine.corpora import blocks, load_corpus
from allatt_prune.data import Corpus, DataError, normalize
from allatt_prune.model import LM, LMConfig
from allatt_prune.engine.run import text_for
from allatt_prune.config import get_recipe
from allatt_prune.train import evaluate, train

SPLITS = 'train', 'valid', 'test'
TEXTS = {s: ''.join(f' \n = {s} {i} = \n \n the <unk> of {s} number {i} , and the rest . \n' for i in range(n)) for s, n in zip(SPLITS, (300, 30, 40))}
TEXTS['train'] += 'valid test\n' # all letters

def zipped(members, **kw): # a zip file with these names and texts
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w', zipfile.ZIP_DEFLATED) as z:
        for name, text in members.items(): z.writestr(name, text, **kw)
    return out.getvalue()

GOOD = zipped({f'wikitext-2/wiki.{s}.tokens': t for s, t in TEXTS.items()} | {'wikitext-2/README': 'not to be touched'})
HTML = b'<!DOCTYPE html><html><body>Please log in to this network</body></html>'

class Server(ThreadingHTTPServer):
    "Answers every request with `body`: up to `cut`, at once or with a pause there; without `length` the client cannot know that."
    daemon_threads = True
    def __init__(self):
        self.answer(GOOD)
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

@pytest.fixture
def home(tmp_path, monkeypatch, server): # an empty cache; the names of corpora lead to the local server
    server.answer(GOOD)
    monkeypatch.setenv('ALLATT_PRUNE_CACHE', str(tmp_path/'cache'))
    monkeypatch.chdir(tmp_path)
    for name in corpora.SOURCES: serve(monkeypatch, server, name, GOOD)
    return tmp_path

def source(server, name, body): # an entry of SOURCES for that answer of the server
    members = [f'wikitext-2/wiki.{s}.tokens' for s in SPLITS] if 'wiki' in name else ['text8']
    return f'http://127.0.0.1:{server.server_port}/{name}-v1.zip', hashlib.sha256(body).hexdigest(), members
def serve(monkeypatch, server, name, body): monkeypatch.setitem(corpora.SOURCES, name, source(server, name, body))

def state(folder): # all files but the lock
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file() and p.name != 'lock'}

def refused(name, *said, error=(DataError, OSError), **how): # in one line that says these, and everything is left as it was
    before = state(Path.cwd())
    with pytest.raises(error) as e: load_corpus(name, **how)
    message = str(e.value)
    assert re.match(r'\w+=.*: .*; ', message) and message.isprintable(), message
    for what in said: assert what in message, message
    assert state(Path.cwd()) == before

def command_refuses(capfd, line, *said, status=1, prepares=False): # the same of the command
    before = state(Path.cwd())
    capfd.readouterr()
    with pytest.raises(SystemExit) as end: main(line.split())
    out, err = capfd.readouterr()
    assert out == '' and err.startswith('allatt-prune: error: ') and err.count('\n') == 1, err
    for what in said: assert what in err, err
    assert end.value.code == status
    after = state(Path.cwd())
    if prepares: after = {p: b for p, b in after.items() if p in before or not p.startswith('cache/prepared') or '.tmp-' in p} # a text that is in order
    assert after == before

def left(home): return list((home/'cache').rglob('*.tmp-*')) # temporary files

def obvious(text): return [w for line in text.split('\n')[:-1] for w in line.split() + ['<eos>']]

# from the net

def test_download(home, server):
    words, corpus = {s: obvious(t) for s, t in TEXTS.items()}, load_corpus('wikitext-2')
    for s in SPLITS: assert corpus.decode(getattr(corpus, s)).split() == [w if w in set(words['train']) else '<unk>' for w in words[s]]
    assert corpus.vocab == [w for w, _ in Counter(words['train']).most_common()] and corpus.unit == 'word'
    assert server.requests == 1
    assert [p.name for p in (home/'cache'/'wikitext-2').iterdir()] == ['wikitext-2-v1.zip']     # nothing was unpacked

def test_the_archive_may_be_put_there_by_hand(home, server):
    (home/'cache'/'wikitext-2').mkdir(parents=True)
    (home/'cache'/'wikitext-2'/'wikitext-2-v1.zip').write_bytes(GOOD)
    assert len(load_corpus('wikitext-2').test) and server.requests == 0

@pytest.mark.parametrize('length', (True, False), ids=('length', 'no-length'))
@pytest.mark.parametrize('tenth', range(10))
def test_a_connection_cut(home, server, tenth, length):
    (home/'precious.txt').write_text('to be or not to be ' * 100)
    load_corpus('precious.txt')
    server.answer(GOOD, cut=tenth * len(GOOD) // 10, length=length)
    refused('wikitext-2', 'corpus=wikitext-2', '127.0.0.1', 'try again later')
    server.answer(GOOD)
    assert len(load_corpus('wikitext-2').train) and server.requests == 1

@pytest.mark.parametrize('answer,named', [
    (dict(body=GOOD[:-1] + b'x'), 'has not the SHA-256'),
    (dict(body=HTML), 'has not the SHA-256'),
    (dict(body=b''), 'has not the SHA-256'),
    (dict(body=HTML, status=404), '404'),
    (dict(body=HTML, status=500), '500'),
], ids=('hash', 'html', 'empty', '404', '500'))
def test_something_else_comes(home, server, answer, named):
    server.answer(**answer)
    refused('wikitext-2', 'corpus=wikitext-2', named, 'put the file at')

def test_no_server(home, monkeypatch):
    monkeypatch.setitem(corpora.SOURCES, 'wikitext-2', ('http://127.0.0.1:9/wikitext-2-v1.zip', '0'*64, ['x']))
    refused('wikitext-2', 'corpus=wikitext-2', '127.0.0.1')

def test_what_the_command_says(home, server, capfd):
    server.answer(HTML)
    command_refuses(capfd, 'train --corpus wikitext-2', 'corpus=wikitext-2', 'put the file at')
    command_refuses(capfd, 'train --corpus none.txt', 'corpus=none.txt: no such file')
    command_refuses(capfd, 'train --corpus none', 'corpus=none: neither a corpus', status=2)

def test_a_damaged_archive_in_the_cache_is_fetched_again(home, server):
    (home/'cache'/'wikitext-2').mkdir(parents=True)
    (home/'cache'/'wikitext-2'/'wikitext-2-v1.zip').write_bytes(GOOD[:1000])
    assert len(load_corpus('wikitext-2').test) and server.requests == 1

# archives

def with_links(): # what an archive must not do to the rest of the disk
    out = io.BytesIO(GOOD)
    with zipfile.ZipFile(out, 'a') as z:
        for name in ('../evil', '..\\evil', '/tmp/evil'): z.writestr(name, 'x')
        info = zipfile.ZipInfo('wikitext-2/link')
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        z.writestr(info, '/etc/passwd')
    return out.getvalue()

def test_nothing_is_unpacked(home, server, monkeypatch):
    server.answer(with_links())
    serve(monkeypatch, server, 'wikitext-2', server.body)
    load_corpus('wikitext-2')
    assert not list(home.rglob('evil')) and not list(home.rglob('link')) and not Path('/tmp/evil').exists()

EVIL = {
    'missing': (zipped({'wikitext-2/other': 'x', 'wikitext-2/more': 'y'}), '0 files named wikitext-2/wiki.train.tokens'),
    'damaged': (GOOD[:200] + bytes(100) + GOOD[300:], 'cannot be read'),
    'truncated': (GOOD[:len(GOOD)//2], 'cannot be read'),
}
@pytest.mark.parametrize('kind', EVIL)
def test_an_archive_that_lies(home, server, monkeypatch, kind):
    body, said = EVIL[kind]
    server.answer(body)
    serve(monkeypatch, server, 'wikitext-2', body)                              # even with the right hash
    with pytest.raises(DataError, match=said): load_corpus('wikitext-2')
    assert not left(home) and not list((home/'cache'/'prepared').iterdir())
    (home/'own.zip').write_bytes(body)
    refused('own.zip', 'corpus=own.zip')

def test_text8(home, server, monkeypatch):
    text = ''.join(random.Random(0).choices(' abcdefghijklmnopqrstuvwxyz', k=10**5))
    server.answer(zipped(dict(text8=text)))
    serve(monkeypatch, server, 'text8', server.body)
    same(load_corpus('text8'), Corpus.from_text(text))

# several processes, and killed ones

SMALL = '--n-layer 1 --d-model 16 --n-head 2 --n-persistent 4 --seg-len 8 --mem-len 8 --batch 1'

def process(home, server, body=GOOD): # the command, in its own process, with the local server
    code = (f'import allatt_prune.engine.corpora as c; c.SOURCES["wikitext-2"] = {source(server, "wikitext-2", body)!r}\n'
            f'import sys; sys.argv[1:] = "time --corpus wikitext-2 {SMALL}".split()\n'
            'from allatt_prune.engine.cli import main; main()')
    return subprocess.Popen([sys.executable, '-c', code], cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def test_several_processes_download_once(home, server):
    server.answer(GOOD, cut=len(GOOD)//2, pause=3)
    jobs = [process(home, server) for _ in range(3)]
    done = [j.communicate(timeout=120) for j in jobs]
    assert [j.returncode for j in jobs] == [0]*3, done
    assert server.requests == 1 and len(load_corpus('wikitext-2').test)

def downloads(home): return list((home/'cache').glob('prepared/.*.tmp-*/archive')) # that go on

def wait_for(found, job):
    for _ in range(1200):
        if found(): return True
        if job.poll() is not None: return False
        time.sleep(.05)
    return False

def test_killed_while_downloading(home, server):
    server.answer(GOOD, cut=len(GOOD)//2, pause=5)
    job = process(home, server)
    assert wait_for(lambda: downloads(home), job), job.communicate()
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert left(home)                           # the dead cannot clean up
    server.answer(GOOD)
    assert len(load_corpus('wikitext-2').test)
    assert not left(home) and [p.name for p in (home/'cache'/'wikitext-2').iterdir()] == ['wikitext-2-v1.zip']

LONG = zipped({f'wikitext-2/wiki.{s}.tokens': TEXTS['train'] * (1500 if s == 'train' else 1) for s in SPLITS}) # takes seconds

def test_killed_while_preparing(home, server, monkeypatch):
    body = LONG
    server.answer(body)
    serve(monkeypatch, server, 'wikitext-2', body)
    rng = random.Random(0)
    for _ in range(2):
        job = process(home, server, body=body)
        assert wait_for(lambda: left(home), job), job.communicate()
        time.sleep(.4 * rng.random())
        job.send_signal(signal.SIGKILL)
        job.wait()
    corpus, n = load_corpus('wikitext-2'), len(obvious(TEXTS['train']))
    assert [len(getattr(corpus, s)) for s in SPLITS] == [1500*n, n, n]
    assert not left(home)

@pytest.mark.parametrize('doing,number', (('download', signal.SIGINT), ('prepare', signal.SIGTERM)))
def test_stopped_by_a_signal(home, server, doing, number):
    server.answer(LONG, **dict(cut=len(LONG)//2, pause=5) if doing == 'download' else {})
    job = process(home, server, body=LONG)
    there = lambda: downloads(home) if doing == 'download' else list((home/'cache').glob('wikitext-2/*.zip'))
    assert wait_for(there, job), job.communicate()
    job.send_signal(number)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 128 + number and out == '' and err.count('\n') == 1 and number.name in err, err
    assert not left(home)

def test_who_waits_says_so(home, server):
    server.answer(GOOD, cut=len(GOOD)//2, pause=1)
    holder = process(home, server)
    try:
        assert wait_for(lambda: downloads(home), holder), holder.communicate()
        holder.send_signal(signal.SIGSTOP)
        other = process(home, server)
        assert select.select([other.stderr], [], [], 60)[0], 'not a word'
        line = other.stderr.readline()
        assert re.fullmatch(rf'allatt-prune: warning: cache={home}/cache: process {holder.pid} of .* works there; waiting for it\n', line)
    finally: holder.send_signal(signal.SIGCONT)
    done = holder.communicate(timeout=60), other.communicate(timeout=60)
    assert (holder.returncode, other.returncode) == (0, 0) and server.requests == 1, done

# damaged caches

def stored(home): # the folder of the only corpus
    folder, = (p for p in (home/'cache'/'prepared').iterdir() if '.' not in p.name)
    return folder

def ours(said): return [str(w.message) for w in said if w.category is UserWarning] # without the sockets and pipes of earlier tests, which are collected when Python likes

def rebuilt(home): # damage is noticed, said in one line, and mended
    with pytest.warns(UserWarning) as said: corpus = load_corpus('wikitext-2')
    warning, = ours(said)
    *_, aside = warning.split()
    assert warning.startswith(f'cache={stored(home)}: damaged; prepared again, delete {stored(home)}.damaged-')
    known = set(obvious(TEXTS['train']))
    for s in SPLITS: assert corpus.decode(getattr(corpus, s)).split() == [w if w in known else '<unk>' for w in obvious(TEXTS[s])]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        load_corpus('wikitext-2')
    return Path(aside)

FILES = 'ids.bin', 'vocab.json', 'corpus.json', 'manifest.json'

@pytest.mark.parametrize('file', FILES)
@pytest.mark.parametrize('damage', ('half', 'empty', 'gone'))
def test_a_half_written_cache_is_made_again(home, file, damage):
    load_corpus('wikitext-2')
    path = stored(home)/file
    whole = path.read_bytes()
    path.unlink() if damage == 'gone' else path.write_bytes(whole[:len(whole)//4*2] if damage == 'half' else b'')
    rebuilt(home)
    assert path.read_bytes() == whole

@pytest.mark.parametrize('file', FILES[1:3]) # the ids are not read when a corpus is opened
def test_one_flipped_bit(home, file):
    load_corpus('wikitext-2')
    path = stored(home)/file
    whole, rng = path.read_bytes(), random.Random(0)
    for at in [0, len(whole) - 1] + rng.sample(range(len(whole)), 8):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at+1:])
        rebuilt(home)
        assert path.read_bytes() == whole

def test_what_others_put_there_is_kept(home):
    load_corpus('wikitext-2')
    folder = stored(home)
    made(folder/'ids.bin', b''), made(folder/'notes.txt', 'precious')
    assert (rebuilt(home)/'notes.txt').read_text() == 'precious'
    made('mine', 'precious'), os.remove(folder/'vocab.json'), (folder/'vocab.json').symlink_to(home/'mine')
    assert (rebuilt(home)/'vocab.json').is_symlink() and (home/'mine').read_text() == 'precious'
    os.rename(folder, home/'away'), made('away/ids.bin', 'precious'), folder.symlink_to(home/'away')
    assert rebuilt(home).is_symlink() and (home/'away'/'ids.bin').read_text() == 'precious'
    shutil.rmtree(folder), made(folder, 'precious')
    assert rebuilt(home).read_text() == 'precious'

def test_a_cache_on_another_disk(home):
    for name in ('disk', 'large', 'texts'): (home/name).mkdir()
    (home/'cache').symlink_to(home/'disk')
    (home/'disk'/'prepared').symlink_to(home/'large')
    (home/'disk'/'wikitext-2').symlink_to(home/'texts')
    made('large/.x.tmp-allatt_prune-0a1b2c3d/ids.bin', 'half')
    load_corpus('wikitext-2')
    assert not list((home/'large').glob('.x*')) and (home/'texts'/'wikitext-2-v1.zip').exists()
    made(stored(home)/'ids.bin', b'')
    rebuilt(home)

@pytest.mark.parametrize('mask,folders,files', ((0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)))
def test_who_may_read_is_the_users_choice(home, mask, folders, files):
    before = os.umask(mask)
    try: load_corpus('wikitext-2')
    finally: os.umask(before)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (home/'cache').rglob('*') if p.name != 'lock'}
    assert len(modes) == 8 and modes == {p: folders if p.is_dir() else files for p in modes}

def test_what_is_prepared_is_on_the_disk_before_it_gets_its_name(home, monkeypatch):
    done, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, 'fsync', lambda fd: (done.append(Path(os.readlink(f'/proc/self/fd/{fd}'))), fsync(fd)))
    monkeypatch.setattr(os, 'rename', lambda a, b: (done.append('rename'), rename(a, b)))
    load_corpus('wikitext-2')
    before, after = done[:done.index('rename')], done[done.index('rename') + 1:]
    tmp = before[-1]
    assert {tmp/f for f in FILES[:3]} < set(before) and tmp.parent == home/'cache'/'prepared' and after == [tmp.parent]

# files and folders of one's own

TEXT = 'one two buckle my shoe\nthree four knock at the door\n' * 40

def made(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None: path.mkdir()
    else: path.write_bytes(content if isinstance(content, bytes) else content.encode())

BAD = [ # what is there, the corpus that is asked for, what the line must name, more arguments
    ({'a.txt': ''}, 'a.txt', 'no text in it', {}),
    ({'a.txt': ' \n\t\n '}, 'a.txt', 'no text in it', {}),
    ({'a.txt': '\ufeff'}, 'a.txt', 'no text in it', {}),
    ({'a.txt': ' \n'}, 'a.txt', 'no text in it', dict(unit='word')),
    ({'a.txt': TEXT.encode() + b'caf\xe9'}, 'a.txt', f'not UTF-8 at byte {len(TEXT) + 3}', {}),
    ({'a.txt': b'\xff\xfea\0b\0'}, 'a.txt', 'not UTF-8 at byte 0', {}),
    ({'a.txt': TEXT + 'a\0b'}, 'a.txt', 'a NUL in it', {}),
    ({'a.txt': TEXT}, 'a.txt/b.txt', 'corpus=a.txt/b.txt: no such file', {}),
    ({}, 'none.txt', 'corpus=none.txt: no such file', {}),
    ({}, 'none', 'corpus=none: neither a corpus', dict(error=ValueError)),
    ({'d/e': TEXT}, 'd', 'corpus=d: no .txt', {}),
    ({'d/train.txt': TEXT, 'd/test.txt': TEXT}, 'd', 'no valid.txt', {}),
    ({'d/wiki.train.tokens': TEXT}, 'd', 'no wiki.valid.tokens', {}),
    ({'d/train.txt': None, 'd/valid.txt': TEXT, 'd/test.txt': TEXT}, 'd', 'corpus=d: no train.txt', {}),
    ({'d/train.txt': ' ', 'd/valid.txt': TEXT, 'd/test.txt': TEXT}, 'd', 'no text in it', {}),
    ({'a.txt.gz': TEXT}, 'a.txt.gz', 'cannot be read', {}),
    ({'a.txt.gz': gzip.compress(TEXT.encode())[:-9]}, 'a.txt.gz', 'cannot be read', {}),
    ({'a.txt.xz': HTML}, 'a.txt.xz', 'cannot be read', {}),
    ({'a.txt.xz': lzma.compress(TEXT.encode())[:-9]}, 'a.txt.xz', 'cannot be read', {}),
    ({'a.zip': HTML}, 'a.zip', 'cannot be read', {}),
    ({'a.zip': zipped({'a': TEXT, 'b': TEXT})}, 'a.zip', '2 files', {}),
    ({'a.txt': TEXT}, 'a.txt', 'cache=a.txt', dict(cache='a.txt')),
    ({'a.txt': TEXT}, 'a.txt', 'unit=syllable', dict(unit='syllable', error=ValueError)),
    ({'a.txt': TEXT}, '', 'corpus=: neither a corpus', dict(error=ValueError)),
]
@pytest.mark.parametrize('files,name,said,how', BAD, ids=[f'{i}-{said}' for i, (*_, said, _) in enumerate(BAD)])
def test_a_text_that_cannot_be_used(home, files, name, said, how):
    load_corpus('wikitext-2')                                                   # a cache to be kept
    for path, content in files.items(): made(path, content)
    refused(name, said, **how)

@pytest.mark.parametrize('begin', ('', 'a', 'é', '漢', '\U0001f600', 'a b é'))
def test_no_word_ends(tmp_path, begin):
    for c in ('a', 'é', '漢', '\U0001f600'):
        made(tmp_path/'a.txt', begin + c * 999)
        for size in (1, 2, 3, 5, 8): assert ''.join(blocks(tmp_path/'a.txt', size=size)) == begin + c * 999
        made(tmp_path/'a.txt', (begin + c * 999).encode() + b'\x80')
        with pytest.raises(DataError, match='not UTF-8 at byte'): list(blocks(tmp_path/'a.txt', size=5))

def test_names_that_are_not_utf8(home):
    odd = lambda name: os.fsdecode(name.encode('latin-1'))
    made(odd('café.txt'), TEXT)
    corpus = load_corpus(odd('café.txt'), unit='raw')
    assert corpus.name == r'caf\udce9.txt' and corpus.decode(corpus.test) == TEXT[-len(corpus.test):]
    made(odd('é.txt'), b'\xff'), made(odd('é/valid.txt'), TEXT), made(odd('è/x'), TEXT), made(odd('ê/Emma.txt'), b'\xff'), made(odd('é.zip'), HTML)
    for bad in ('é.txt', 'é', 'è', 'ê', 'é.zip', 'none/é', 'é.none', 'ö'):
        with pytest.raises((ValueError, OSError)) as e: load_corpus(odd(bad))
        assert r'\udc' in str(e.value) and str(e.value).encode()
    made('a.txt', TEXT)
    cache = home/odd('cäche')
    load_corpus('a.txt', cache)
    path, = cache.glob('prepared/*/ids.bin')
    path.write_bytes(b'')
    with pytest.warns(UserWarning, match='damaged') as said: load_corpus('a.txt', cache)
    assert r'c\udce4che' in ours(said)[0]
    with pytest.raises(OSError) as e: load_corpus('a.txt', odd('é.txt'))
    assert r'cache=\udce9.txt' in str(e.value)

def test_one_line_will_do(home):
    made('a.txt', 'a line without an end ' * 20)
    chars, words = load_corpus('a.txt'), load_corpus('a.txt', unit='word')
    assert chars.decode(np.concatenate([chars.train, chars.valid, chars.test])) == 'a line without an end ' * 20
    assert words.decode(words.test) == 'line without an end <unk>' and len(words.train) == round(.9 * 101)

def test_marks_of_other_systems_are_dropped(home):
    made('unix.txt', TEXT), made('dos.txt', b'\xef\xbb\xbf' + TEXT.replace('\n', '\r\n').encode())
    for unit in ('char', 'word', 'raw'):
        a, b = (load_corpus(f, unit=unit) for f in ('unix.txt', 'dos.txt'))
        assert a.vocab == b.vocab and (a.train == b.train).all() and (a.test == b.test).all()

@pytest.mark.parametrize('end', ('', '.gz', '.xz', '.zip'))
def test_packed_or_not_in_a_folder_or_alone(home, end):
    pack = {'': bytes, '.gz': gzip.compress, '.xz': lzma.compress, '.zip': lambda t: zipped({'whatever': t})}[end]
    for s in SPLITS: made(f'w/wiki.{s}.tokens{end}', pack(TEXTS[s].encode())), made(f't/{s}.txt{end}', pack(TEXTS[s].encode()))
    made(f'alone{end}', pack(TEXT.encode()))
    words, chars, raw, alone = load_corpus('w'), load_corpus('t'), load_corpus('t', unit='raw'), load_corpus(f'alone{end}', unit='raw')
    assert (words.unit, chars.unit, load_corpus('t', unit='word').hash) == ('word', 'char', words.hash)
    assert len(words.valid) == len(obvious(TEXTS['valid'])) and raw.decode(raw.valid) == TEXTS['valid']
    assert chars.decode(chars.valid) == normalize(TEXTS['valid'])
    assert alone.decode(alone.train) == TEXT[:round(.9 * len(TEXT))]

def test_books(home):
    made('books/Persuasion.md', '# Persuasion\n\nVanity: Sir *Walter* Elliot, of Kellynch Hall, in 1818.'), made('books/deep/Emma.txt', 'Emma — handsome,\nclever, and rich; three volumes.')
    made('books/cover.png', b'\x89PNG\xff')
    chars, words = load_corpus('books'), load_corpus('books', unit='word')
    whole = lambda c: c.decode(np.concatenate([c.train, c.valid, c.test]))
    texts = 'persuasion vanity sir walter elliot of kellynch hall in one eight one eight', 'emma handsome clever and rich three volumes'
    assert whole(chars) in (f'{a} {b} ' for a, b in (texts, texts[::-1]))
    assert whole(words).count('<eos>') == 2 and load_corpus(home/'books').hash == chars.hash
    made('books/empty.md', '--- 漢字 ---'), made('books/._Emma.txt', b'\xff')
    assert whole(load_corpus('books')) == whole(chars)
    made('books/deep/Emma.txt.XZ', lzma.compress(Path('books/deep/Emma.txt').read_bytes())), os.remove('books/deep/Emma.txt')
    assert whole(load_corpus('books')) == whole(chars) and load_corpus('books', unit='word').hash == words.hash
    made('books/bad.txt', b'\xff')
    with pytest.raises(DataError, match='books/bad.txt: not UTF-8 at byte 0'): load_corpus('books')

def test_a_changed_file_is_noticed(home):
    made('a.txt', TEXT)
    first = load_corpus('a.txt')
    time.sleep(.05)                                                              # times on a disk are some milliseconds apart
    made('a.txt', TEXT.replace('door', 'gate'))                                  # of the same length
    assert 'gate' in (second := load_corpus('a.txt')).decode(second.train) and 'gate' not in first.decode(first.train)

def test_a_file_that_changes_while_it_is_read(home, monkeypatch):
    made('a.txt', TEXT)
    def then_written(path):
        yield from blocks(path)
        made('a.txt', TEXT * 2)
    monkeypatch.setattr(corpora, 'blocks', then_written)
    with pytest.raises(DataError, match='changed while it was read; try again'): load_corpus('a.txt')
    monkeypatch.setattr(corpora, 'blocks', blocks)
    same(load_corpus('a.txt', unit='raw'), Corpus.from_text(TEXT * 2, 'raw'))

def test_what_is_prepared_is_not_read_again(home, monkeypatch):
    made('a.txt', TEXT)
    first = load_corpus('a.txt')
    monkeypatch.setattr(corpora, 'blocks', pytest.fail)
    same(load_corpus('a.txt'), first)

def test_how_a_file_is_packed_is_part_of_what_it_is(home):
    made('a.txt.gz', gzip.compress(TEXT.encode()))
    load_corpus('a.txt.gz')
    os.rename('a.txt.gz', 'a.bin')
    with pytest.raises(DataError, match='not UTF-8 at byte 1'): load_corpus('a.bin')

def test_a_pipe_is_not_read(home):
    made('d/valid.txt', TEXT), made('d/test.txt', TEXT)
    os.mkfifo('d/train.txt')
    refused('d', 'corpus=d: no train.txt')

def test_only_our_own_leftovers_are_swept(home):
    mine = 'prepared/mine.tmp/x', 'prepared/.x.tmp-0a1b2c3d/ids.bin', 'prepared/.x.tmp-allatt_prune-mine/ids.bin', 'away/ids.bin', 'text8/x.tmp'
    for path in mine: made(f'cache/{path}', 'precious')
    link = home/'cache'/'prepared'/'.x.tmp-allatt_prune-01234567'
    link.symlink_to(home/'cache'/'away')
    made('cache/prepared/.x.tmp-allatt_prune-0a1b2c3d/ids.bin', 'half')
    made('a.txt', TEXT)
    load_corpus('a.txt')
    for path in mine: assert (home/'cache'/path).read_text() == 'precious'
    assert link.is_symlink() and not (home/'cache'/'prepared'/'.x.tmp-allatt_prune-0a1b2c3d').exists()

def test_a_name_that_no_file_can_have(home): refused('x' * 300 + '/y', 'corpus=xxx', 'File name too long')

def test_an_unwritable_cache(home):
    made('a.txt', TEXT), made('file', 'x')
    refused('a.txt', 'cache=file/below', cache='file/below')
    refused('wikitext-2', 'cache=file', cache='file')

# what becomes of a text that is not plain a-z

def whole(c): return c.decode(np.concatenate([c.train, c.valid, c.test]))

@pytest.fixture
def told(caplog): # lines about how a text was read, since the last call
    caplog.set_level('INFO', 'allatt_prune')
    def lines():
        said = [r.getMessage() for r in caplog.records if r.getMessage().startswith('corpus=')]
        caplog.clear()
        return said
    return lines

PROSE = 'It was "Emma" who said:\nI have 2 cats, and a dog.\n\n' * 30

def test_a_file_and_a_folder_are_read_alike(home, told):
    made('a.txt', PROSE), made('d/a.txt', PROSE)
    for unit in (None, 'char'):
        file, folder = load_corpus('a.txt', unit=unit), load_corpus('d', unit=unit)
        assert whole(file) == normalize(PROSE) == whole(folder) and file.hash == folder.hash and file.unit == 'char'
        assert told() == ['corpus=d: 1 file, read as char (a-z and space); 0.0% of its characters are letters or digits outside a-z, 0-9, now spaces']
    file, folder = load_corpus('a.txt', unit='raw'), load_corpus('d', unit='raw')
    assert whole(file) == PROSE == whole(folder) and file.hash == folder.hash and file.unit == 'raw'
    assert told() == ['corpus=d: 1 file, read as raw (all characters)']

def save(name, corpus, **vocab): # a model of that text
    cfg = LMConfig(vocab=len(corpus.vocab), n_layer=1, d_model=8, n_head=2, n_persistent=4, seg_len=8, mem_len=8)
    LM(cfg).save_pretrained(name, vocab=dict(unit=corpus.unit, normal=corpus.normal, symbols=corpus.vocab) | vocab)

def test_a_text_is_read_as_the_text_of_the_model_was(home):
    made('a.txt', PROSE), made('d/a.txt', PROSE)
    assert 'z' not in load_corpus('a.txt').vocab                                 # numbered by its own letters
    for name in ('a.txt', 'd'):
        text = text_for('tiny-books', name)
        assert whole(text) == normalize(PROSE) and text.vocab == [' ', *'abcdefghijklmnopqrstuvwxyz']
    made('short.txt', 'to be or not to be ' * 9 + 'that is the question')        # a word that comes late, and is known
    late = text_for('tiny-books-word', 'short.txt')
    assert late.decode(late.test).split()[-3:] == ['the', 'question', '<eos>'] and late.unknown(late.test) == 0
    for i in range(5): made(f'books/{i}.txt', PROSE + 'More!\nOf this')
    for unit, seen in (('char', normalize(PROSE)), ('word', normalize(PROSE) + '<eos>'), ('raw', PROSE)):
        save(unit, load_corpus('books', unit=unit))
        for name in ('a.txt', 'd'): assert whole(text_for(unit, name)) == seen, (unit, name)
    made('pets.txt', PROSE + 'More!\nOf this\n')
    save('as-it-is', load_corpus('pets.txt', unit='word'))
    for name in ('a.txt', 'd'): assert whole(text_for('as-it-is', name)).split() == obvious(PROSE)
    for name, unit in (('char', 'raw'), ('raw', 'char'), ('word', 'raw')):
        with pytest.raises(ValueError, match=f'unit={unit}: the model was made with unit={name}; leave it out'): text_for(name, 'a.txt', unit=unit)

def test_models_saved_without_a_word_about_it(home): # their symbols say how their text was read
    made('a.txt', PROSE), made('b.txt', 'the cat sat ' * 50)
    for name, unit in (('a.txt', 'raw'), ('a.txt', 'char'), ('a.txt', 'word'), ('b.txt', 'char')):
        corpus = load_corpus(name, unit=unit)
        cfg = LMConfig(vocab=len(corpus.vocab), n_layer=1, d_model=8, n_head=2, n_persistent=4, seg_len=8, mem_len=8)
        LM(cfg).save_pretrained(f'{name}-{unit}', vocab=dict(unit=unit.replace('raw', 'char'), symbols=corpus.vocab))
        again = text_for(f'{name}-{unit}', name)
        assert (again.unit, again.hash, whole(again)) == (unit, corpus.hash, whole(corpus))

def test_the_text_of_a_run_is_read_again_as_it_was(home, caplog):
    made('p/one.txt', PROSE), made('p/two.md', PROSE.upper())
    made('verse.txt', TEXT)                                                      # words of a-z, but in lines
    for unit, name in (('word', 'p'), ('word', 'verse.txt'), ('raw', 'p'), ('raw', 'p/one.txt')):
        folder = f"{unit}-{name.replace('/', '-')}"
        with caplog.at_level('INFO', 'allatt_prune'): main(f'train {TOY} --corpus {name} --unit {unit} --run-dir {folder}'.split())
        assert f'corpus={Path(name).name}: read as {unit} (' in caplog.text
        caplog.clear()
        main(f'evaluate {folder}/baseline'.split())
        assert whole(text_for(f'{folder}/baseline', name)) == whole(load_corpus(name, unit=unit))
        assert load_corpus(name, unit=unit).hash in (Path(folder)/'corpus.json').read_text()
        main(f'train --recipe tiny {TOY} --corpus {name} --unit {unit} --run-dir {folder} --resume'.split())

@pytest.mark.parametrize('share', (0, .01, .0101, .3))
def test_what_a_model_does_not_know_is_counted(home, capfd, share):
    known, n = ['one', 'two', 'three', '<unk>'], 10_000
    words = ['one', 'two'] * (n // 2)
    for i in range(round(share * n)): words[i * n // max(1, round(share * n))] = ('pear', '<unk>')[i % 2]  # there, and in the text
    for split in SPLITS: made(f'd/{split}.txt', ' '.join(words if split == 'test' else ['one', 'two'] * 500))
    made('m.txt', 'one two three <unk>\n' * 100)
    corpus = load_corpus('m.txt', unit='word')
    save('m', corpus, symbols=corpus.vocab)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        text = text_for('m', 'd')
        assert text_for('m', 'd', splits=('train', 'valid')).vocab == text.vocab
    assert (text.unknown(text.test), text.unknown(text.train)) == (pytest.approx(share, rel=.01), 0)     # one <eos> more
    assert [m.split(', and')[0] for m in ours(said)] == [f'corpus=d: the model does not know {text.unknown(text.test):.1%} of the words in test'] * (share > .01001)
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        main('evaluate m --corpus d --split test --device cpu'.split())
    out, err = capfd.readouterr()
    assert f' tokens, {share:.1%} of them unknown\n' in out and len(ours(said)) == (share > .01001)
    main('evaluate m --corpus d --split valid --device cpu'.split())
    main('score m --corpus d --method magnitude --device cpu'.split())
    out, err = capfd.readouterr()
    assert out.count(', 0.0% of them unknown') == 2 and err == ''

def test_characters_that_a_model_does_not_know(home):
    made('d/train.txt', 'abc' * 90), made('d/valid.txt', 'abcz' * 9), made('d/test.txt', 'abzz' * 9)
    save('m', load_corpus('d'))
    with pytest.warns(UserWarning, match='does not know 50.0% of the characters in test'): text = text_for('m', 'd')
    assert [text.unknown(getattr(text, s)) for s in SPLITS] == [0, .25, .5]

@pytest.mark.parametrize('text,lost', (('Schöne Straße!\n', 2/15), ('naïve words, many of them plain.\n', 1/33), ('Ἄνδρα x\n', 5/8), ('x²-٣\n', 2/5)))
def test_letters_that_are_lost_are_counted(home, told, text, lost):
    assert lost == sum(c.isalnum() and not c.isascii() for c in text) / len(text)
    made('a.txt', text * 300), made('d/a.txt', text * 300)
    line = f'{lost:.1%} of its characters are letters or digits outside a-z, 0-9'
    for _ in range(2):                                                           # prepared, and opened again
        for name in ('a.txt', 'd'):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter('always')
                load_corpus(name)
            assert ours(said) == [f'corpus={name}: {line}, and became spaces; unit=raw keeps them'] * (lost > .05)
        assert [line in x for x in told()] == [True, True]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert whole(load_corpus('a.txt', unit='raw')) == text * 300 == whole(load_corpus('d', unit='raw'))

def test_a_text_without_any_of_the_letters(home):
    made('a.txt', 'λόγος ' * 100), made('d/a.txt', 'λόγος ' * 100)
    for name in ('a.txt', 'd'):
        refused(name, 'letters outside a-z; unit=raw keeps them')
        assert 'λόγος' in whole(load_corpus(name, unit='raw'))

def test_what_a_folder_leaves_out_is_said(home, told):
    for i in range(3): made(f'd/{i}.pos', TEXT)
    made('d/a.rst', TEXT), made('d/LICENSE', TEXT), made('d/.git/x.txt', TEXT), made('d/b.png', b'\x89PNG\xff')
    with pytest.raises(DataError, match=r'no [.]txt, .*, only .*3 [.]pos.*; .*unit=raw'): load_corpus('d')
    made('d/c.txt', TEXT), made('d/nul.bin', TEXT + '\0'), made('d/e.tar.gz', gzip.compress(b'\xff'))
    assert whole(load_corpus('d')) == normalize(TEXT)
    line, = told()
    assert 'corpus=d: 1 file, read as char (a-z and space); left out: ' in line
    for what in ('3 .pos', '1 .rst', '1 with no ending', '1 .png', '1 .bin', '1 .gz'): assert what in line
    assert whole(load_corpus('d', unit='raw')) == TEXT * 6
    line, = told()
    assert 'corpus=d: 6 files, read as raw (all characters); left out: ' in line and line.count(' .') == 3, line
    for what in ('1 .png', '1 .bin', '1 .gz'): assert what in line
    made('d/f.txt', b'\xff')                                                     # called a text, and none
    with pytest.raises(DataError, match='d/f.txt: not UTF-8 at byte 0'): load_corpus('d', unit='raw')

def test_code_is_read_as_it_is(home):
    code = 'def f(x):\n\treturn x**2 # Größe\n'
    made('src/a.py', code), made('src/sub/b.py', code * 50)
    corpus = load_corpus('src', unit='raw')
    assert whole(corpus) == code * 51 and corpus.decode(corpus.valid) == (code * 51)[round(.9 * 51 * len(code)):round(.95 * 51 * len(code))]

# what training and evaluation refuse

TOY = '--n-layer 1 --d-model 8 --n-head 2 --n-persistent 4 --seg-len 8 --mem-len 8 --batch 4 --steps 3 --prune-steps 3 --gate-steps 2 --device cpu'

def test_too_short(home, capfd):
    made('a.txt', TEXT)
    command_refuses(capfd, f'run {TOY} --corpus a.txt --batch 900 --run-dir r', 'corpus=a.txt', '900 streams', prepares=True)
    made('b.txt', 'ab' * 5)
    command_refuses(capfd, f'run {TOY} --corpus b.txt --run-dir r', 'corpus=b.txt', '4 streams', prepares=True)

@pytest.fixture
def trained(home, capfd):
    made('a.txt', TEXT)
    main(f'run {TOY} --gate-init -1 --corpus a.txt --run-dir r'.split())            # all gates closed
    capfd.readouterr()
    return home

def test_evaluate(trained, capfd):
    def says(line): main(f'evaluate {line}'.split()); return capfd.readouterr().out
    n = len(load_corpus('a.txt').test) - 1
    one, pruned, many = says('r/gated --corpus a.txt --split test'), says('r/pruned --corpus a.txt --split test'), says('r/baseline --corpus a.txt --split test --batch 60')
    assert one.startswith('test of a.txt: ') and f'over {n:,} tokens' in one and f'over {n:,} tokens' in many
    assert abs(float(one.split()[3]) - float(pruned.split()[3])) < 2e-4
    assert many.split()[3] != says('r/baseline --corpus a.txt --split test').split()[3]
    assert says('r/baseline --corpus a.txt --mem-len 50') != says('r/baseline --corpus a.txt')

def test_evaluate_refuses(trained, capfd):
    made('b.txt', TEXT.replace('knock', 'quack'))
    assert load_corpus('a.txt').hash != load_corpus('b.txt').hash
    command_refuses(capfd, 'evaluate r/pruned --corpus b.txt', 'corpus=b.txt', "does not know 'q'")
    command_refuses(capfd, 'evaluate r/pruned --corpus a.txt --unit word', 'unit=word', 'made with unit=char', status=2)
    command_refuses(capfd, 'evaluate r/none --corpus a.txt', 'checkpoint=r/none')
    for part in ('gates.safetensors', 'vocab.json'):
        shutil.copytree('r/gated', f'no-{part}')
        os.remove(f'no-{part}/{part}')
        command_refuses(capfd, f'evaluate no-{part} --corpus a.txt', f'{part} is missing')
    config, parts = checkpoint.load('r/gated')
    checkpoint.save('odd', config, **parts | dict(vocab=[]))
    command_refuses(capfd, 'evaluate odd --corpus a.txt', 'vocab.json is damaged')
    command_refuses(capfd, f'run {TOY} --corpus a.txt --cutoffs 2,5 --run-dir s', 'cutoffs=[2, 5]', status=2)
    command_refuses(capfd, 'evaluate r/pruned --corpus a.txt --split last', "argument --split: invalid choice: 'last'", status=2)
    command_refuses(capfd, 'evaluate r/pruned --corpus a.txt --batch 0', 'batch=0', status=2)
    command_refuses(capfd, 'evaluate r/pruned --corpus a.txt --mem-len -1', 'mem_len=-1', status=2)
    command_refuses(capfd, 'evaluate r/pruned --corpus a.txt --mem-len few', "argument --mem-len: invalid int value: 'few'", status=2)

def test_ids_outside_the_vocabulary():
    recipe = get_recipe('tiny', n_layer=1, d_model=8, n_head=2, n_persistent=4, seg_len=8, mem_len=8, batch=4, steps=3)
    for wrong in (3, 200, -1):
        ids = np.array([0, 1, 2] * 99, dtype=np.int64)
        model, corpus = LM(recipe.config(3)), Corpus('toy', ids, ids, ids, ['a', 'b', 'c'], 'char')
        train(model, corpus, recipe)
        ids[10] = wrong
        with pytest.raises(DataError, match=f'corpus=toy: symbol {wrong} in it, but the model knows 0 to 2'): train(model, corpus, recipe)
        with pytest.raises(DataError, match=f'symbol {wrong} in it, but the model knows 0 to 2'): evaluate(model, ids)

# the fast way against the obvious one

alphabet = st.text(st.sampled_from('ab Aé7\n漢\U0001f600.\u3000\t'), min_size=1, max_size=80)

def same(a, b): # the same vocabulary, and the same ids of the same type
    assert (a.vocab, a.unit, a.hash) == (b.vocab, b.unit, b.hash)
    for s in SPLITS: assert getattr(a, s).dtype == getattr(b, s).dtype and getattr(a, s).tolist() == getattr(b, s).tolist()

@settings(max_examples=40, deadline=None)
@given(text=alphabet, unit=st.sampled_from(('char', 'word', 'raw')), size=st.integers(1, 9))
def test_any_text_cut_anywhere(tmp_path_factory, text, unit, size):
    folder = tmp_path_factory.mktemp('any')
    (folder/'a.txt').write_text(text := 'x\n' + text, encoding='utf-8')
    with pytest.MonkeyPatch.context() as m:
        m.setattr(corpora, 'blocks', lambda path: blocks(path, size=size))
        same(load_corpus(folder/'a.txt', folder/'cache', unit=unit), Corpus.from_text(text, unit))

@settings(max_examples=20, deadline=None)
@given(train=alphabet, valid=alphabet, test=alphabet)
def test_any_text_in_three_parts(tmp_path_factory, train, valid, test):
    folder = tmp_path_factory.mktemp('any')
    texts = dict(train='x\n' + train, valid=valid, test=test)
    for s, t in texts.items(): (folder/f'{s}.txt').write_text(t, encoding='utf-8')
    raw, chars, words = (load_corpus(folder, folder/'cache', unit=u) for u in ('raw', 'char', 'word'))
    assert raw.vocab[:len(set(texts['train']))] == sorted(set(texts['train']))
    line = lambda t: obvious(t if t.endswith('\n') else t + '\n')
    assert [w for w in words.vocab if w != '<unk>'] == [w for w, _ in Counter(line(texts['train'])).most_common()]
    for s, t in texts.items():
        assert raw.decode(getattr(raw, s)) == ''.join(c if c in texts['train'] else '\ufffd' for c in t)
        assert chars.decode(getattr(chars, s)) == ''.join(c if c in normalize(texts['train']) else '\ufffd' for c in normalize(t))
        known = set(line(texts['train']))
        assert words.decode(getattr(words, s)).split() == [w if w in known else '<unk>' for w in line(t)]
