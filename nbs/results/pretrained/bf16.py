"""Why do the logits of a Llama cast by .to(bfloat16) differ from those of its reload?  python bf16.py

The rotary frequencies are a buffer that is not saved. `.to(bfloat16)` rounds it, `from_pretrained(dtype=torch.bfloat16)` computes it in float32.
The weights are equal, and with the frequencies of the reload the logits are, too. So it concerns any model with rotary positions, pruned or not.
A model that is loaded with a dtype reloads without a difference. SmolLM2 (128 tokens): largest difference of the logits 1.03, with equal frequencies
0; each is 1.8 from the logits in float32, and the loss is the same (2.9521 rounded, 2.9544 not, 2.9536 in float32, on 4 passages of 512 tokens).
"""
import tempfile, torch
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, initializer_range=.3)
cast = AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
ids = torch.randint(50, (2, 200))
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    cast.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    assert all(torch.equal(p, q) for p, q in zip(cast.parameters(), loaded.parameters()))
    want = loaded(input_ids=ids).logits
    print('frequencies', cast.model.rotary_emb.inv_freq.dtype, loaded.model.rotary_emb.inv_freq.dtype)
    print('largest difference of the logits', (cast(input_ids=ids).logits - want).abs().max().item())
    cast.model.rotary_emb.inv_freq = loaded.model.rotary_emb.inv_freq
    print('with equal frequencies          ', (cast(input_ids=ids).logits - want).abs().max().item())
