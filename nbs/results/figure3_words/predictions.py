"""What is expected of figure3_words.py, written down on 28 November 2026, before any of its trainings began.

From: prune_or_small, words, the paper's training, half of the dropout, seeds 0 to 2, mean validation perplexity: leave_one_out 113.56,
small 113.06, narrow 114.74; on test 105.24, 104.48, 105.31 (narrow is closer there). The five models of words in the repository, scored
on the twenty books: 0.973 to 0.984 of their validation perplexity. choice, words, 1,500 steps: gates are 0.7 % behind leave_one_out
on validation, 0.1 % on test."""
BOOKS = dict(gates=111.4, narrow=111.6, small=110.5, leave_one_out=111.0) # perplexity on the twenty books, mean over five seeds
GAPS = {('gates', 'narrow'): -.2, ('gates', 'small'): .8, ('gates', 'leave_one_out'): .4, # perplexity, per cent
        ('leave_one_out', 'narrow'): -.5, ('small', 'narrow'): -1.}
VERDICT = 'undecided' # gates - narrow; half-width of the interval: .6 %
