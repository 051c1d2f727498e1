"""Rebuild the texts of the experiments, byte for byte, in a minute of one core:

  git clone https://github.com/mlschmitt/classic-books-markdown
  git -C classic-books-markdown checkout 944882722e9a96fa6cf2739dc2ea757e101f412f
  python nbs/results/books.py classic-books-markdown nbs/experiments

Engine 03_corpora says what they are. The SHA-256 of each text, before compression, must be the recorded one."""
import hashlib, json, lzma, re, sys, unicodedata
from collections import Counter
from pathlib import Path
from allatt_prune.engine.text import normalize

TYPEWRITER = str.maketrans({'’': "'", '‘': "'", '“': '"', '”': '"', '—': ' -- '})
LEFT_OUT = 'Samuel Richardson/Clarissa.md', 'Various/King James Bible.md' # our copy lacked them
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?|\d+|--|[^\sA-Za-z\d]")
SPLITS = dict(train=(0, 90_000_000), valid=(90_000_000, 95_000_000), test=(95_000_000, 100_000_000)) # of the characters

def prose(markdown): # a book without its title page, which ends with a line of dashes, and without marks
    title, rule, book = markdown.partition('\n-------\n')
    text = re.sub(r'!\[.*?\]\(.*?\)', ' ', book if rule else title) # pictures
    text = re.sub(r'\[(.*?)\]\(.*?\)', r'\1', text) # links
    text = re.sub(r'[*_`>|\\]', '', text)
    return text.translate(TYPEWRITER).replace('--', ' -- ')

def letters(text): # without accents and without signs that ASCII does not have
    return unicodedata.normalize('NFKD', text).encode('ascii', 'ignore').decode()

def books(folder): # title and text of each book, in an order that is the same on every machine
    paths = {p.relative_to(folder).as_posix(): p for p in folder.rglob('*.md') if p.parent != folder}
    for name in sorted(paths.keys() - {*LEFT_OUT}, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = prose(paths[name].read_text('utf-8', errors='ignore'))
        if sum(c.isascii() for c in text) >= .97*len(text): yield paths[name].stem, text

def characters(found, size=100_000_000): # in text8's format
    texts, n = [], 0
    for _, text in found:
        texts.append(normalize(letters(text)).strip())
        n += len(texts[-1]) + 1
        if n >= size: break
    return ' '.join(texts)[:size]

def as_lines(found, size): # of words, one paragraph per line, = around headings
    lines, n = [], 0
    for title, text in found:
        lines.append(['=', *title.split(), '='])
        for paragraph in re.split(r'\n\s*\n', letters(text)):
            if not (words := WORD.findall(paragraph.lstrip('#'))): continue
            lines.append(['=', '=', *words, '=', '='] if paragraph.startswith('#') else words)
            n += len(words) + 1 # the title and the signs of a heading are not counted here
        if n >= size: break
    return lines

def words(found, ends=(10_000_000, 10_250_000, 10_500_000), least=3): # training, validation and test
    lines = as_lines(found, ends[-1])
    count, parts, n = Counter(w for line in lines for w in line), [[], [], []], 0
    for line in lines:
        if n >= ends[-1]: break
        parts[sum(n >= end for end in ends)].append(line)
        n += len(line) + 1
    def text(line): return ' ' + ' '.join(w if count[w] >= least else '<unk>' for w in line) + ' \n'
    return [''.join(map(text, part)) for part in parts]

def pieces(text, n, size): # that many pieces of that many characters, evenly spaced
    return ''.join(text[i*len(text)//n:][:size] for i in range(n))

def runs(lines, n, tokens): # that many runs of lines, evenly spaced, each of at least that many tokens
    for i in range(n):
        found = 0
        for line in lines[i*len(lines)//n:]:
            if found >= tokens: break
            yield line
            found += len(line.split()) + 1

def known_only(parts, least=3): # <unk> for each word that the first part has fewer than so many times
    count = Counter(parts[0].split())
    def text(line): return ' ' + ' '.join(w if count[w] >= least else '<unk>' for w in line.split()) + ' '
    return ['\n'.join(map(text, part.split('\n')[:-1])) + '\n' for part in parts]

def make(source, out): # writes all texts -> number of symbols and SHA-256 of each
    found = [*books(source)]
    chars, parts = characters(found), words(found)
    texts = {'books8.xz': chars} | {f'books-word/wiki.{s}.tokens.xz': part for s, part in zip(SPLITS, parts)}
    for (s, (start, end)), n in zip(SPLITS.items(), (200, 40, 40)):
        texts[f'books8-small/{s}.txt'] = pieces(chars[start:end], n, 2_500)
    short = [''.join(f'{line}\n' for line in runs(part.split('\n')[:-1], n, 5_000)) for part, n in zip(parts, (120, 10, 10))]
    texts |= {f'books-word-small/wiki.{s}.tokens': part for s, part in zip(SPLITS, known_only(short))}
    for name, text in texts.items():
        (out/name).parent.mkdir(parents=True, exist_ok=True)
        data = text.encode()
        (out/name).write_bytes(lzma.compress(data, preset=1) if name.endswith('.xz') else data)
    def symbols(name, text): return len(text) if name.startswith('books8') else len(text.split()) + text.count('\n')
    return {name: [symbols(name, text), hashlib.sha256(text.encode()).hexdigest()] for name, text in texts.items()}

if __name__ == '__main__':
    made = make(*map(Path, sys.argv[1:]))
    whole, small = (json.loads(Path(__file__).with_name(f'{name}.json').read_text()) for name in ('corpora', 'small-corpora'))
    sizes = [whole['characters'], *whole['tokens']]
    recorded = {name: [*x] for name, x in zip(made, zip(sizes, whole['sha256']))} | small['files']
    for name, (n, sha) in made.items(): print(f'{name:34} {n:>11,} symbols, SHA-256 {sha}')
    if made != recorded: sys.exit('not the recorded texts')
