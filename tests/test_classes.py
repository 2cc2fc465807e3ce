"""Which test holds which class of failure that others have reported: pushing (C), running (D), templates (E5)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLASSES = {
    "C1 a card that the Hub refuses": [
        "test_hub.test_a_card_that_the_hub_refuses",
        "test_hub.test_metadata_of_a_source",
    ],
    "C2 refusals that stay": ["test_hub.test_permanent_refusals_stop_at_once"],
    "C3 too many commits": ["test_hub.test_429_is_waited_for", "test_hub.test_three_hundred_files"],
    "C4 nothing to change": ["test_hub.test_a_second_push_has_nothing_to_do"],
    "C5 tokens that may not create": ["test_hub.test_narrow_tokens"],
    "C6 no token": ["test_hub.test_tokens"],
    "C7 junk beside the model": ["test_hub.test_a_fresh_push_is_one_commit_of_exactly_the_model"],
    "C8 interrupted uploads": ["test_hub.test_a_broken_connection_resumes"],
    "C9 size of files": [
        "test_hub.test_files_that_the_hub_cannot_take",
        "test_format.test_splits_stay_below_the_limit",
    ],
    "D1 sliding caches that rewind": [
        "test_lossless.test_every_draft_length",
        "test_runtime.test_a_ring_that_has_turned_over",
    ],
    "D2 rows that depend on the batch": [
        "test_runtime.test_logits_do_not_depend_on_the_batch",
        "test_lossless.test_ids_with_drafting_equal_ids_without",
    ],
    "D3 drafting at the end of the context": ["test_lossless.test_the_context_fills_exactly_as_without_drafting"],
    "D4 the distribution": ["test_sampler.test_draws_follow_the_distribution"],
    "D5 logits that are no numbers": [
        "test_sampler.test_logits_that_are_not_finite",
        "test_runtime.test_errors_name_what_is_wrong",
    ],
    "D6 temperature 0, tiny, unset": ["test_sampler.test_temperature_zero_tiny_and_set", "test_cli.test_sampling"],
    "D7 sampler arguments": [
        "test_cli.test_values_that_make_no_sense",
        "test_sampler.test_at_least_one_token_survives",
    ],
    "D8 shards of two models": ["test_format_hostile.test_shard_of_another_build"],
    "D9 several end tokens": [
        "test_tokenizer.test_eos_is_the_union",
        "test_tokenizer.test_end_of_turn_of_the_template",
    ],
    "D10 BOS doubled or invented": [
        "test_cli.test_gemma_like_template_end_to_end",
        "test_tokenizer.test_null_bos_is_never_invented",
        "test_tokenizer.test_bos_as_transformers_adds_it",
    ],
    "D11 characters in pieces": [
        "test_tokenizer.test_characters_come_at_once",
        "test_tokenizer.test_unfinished_and_invalid_bytes",
        "test_hostile_models.test_half_a_character_waits_and_comes_out_at_the_end",
    ],
    "D12 llama3 RoPE": [
        "test_architecture.test_rope_scaling_is_used_not_only_read",
        "test_decoder.test_logits_equal_transformers",
    ],
    "D13 YaRN": ["test_architecture.test_yarn_attention_factor"],
    "D14 LongRoPE: refused": ["test_architecture.test_other_rope_kinds_are_refused_by_name"],
    "D15 windows": ["test_architecture.test_qwen2_windows", "test_architecture.test_windows_of_other_families"],
    "D16 what Gemma adds": [
        "test_decoder.test_logits_equal_transformers",
        "test_runtime.test_logits_equal_the_decoder",
    ],
    "D17 prompts longer than the context": [
        "test_cli.test_prompt_longer_than_the_context",
        "test_generate.test_prompt_that_fits_exactly_and_one_that_does_not",
    ],
    "D18 empty prompts": ["test_cli.test_empty_prompts"],
    "D19 contexts of a million": ["test_hostile_models.test_a_long_context_takes_memory_as_it_is_used"],
    "D20 threads": ["test_runtime.test_more_threads_than_cores_end_with_the_same_bits"],
    "D21 processors without AVX2": ["test_old_processors.test_without_avx2"],
    "D22 GPUs that cannot be used": ["test_hostile_models.test_a_device_that_is_not_there_is_an_error"],
    "D23 memory that goes away": [
        "test_cut_files.test_a_shard_that_is_cut_while_open",
        "test_cut_files.test_a_worker_meets_the_missing_part_first",
        "test_runtime.test_weights_can_be_kept_in_ram",
    ],
    "D24 seeds and threads": [
        "test_lossless.test_seeds_differ_and_repeat",
        "test_sampler.test_levels_draw_the_same_tokens",
    ],
    "D25 templates that refuse": [
        "test_cli.test_template_refusal_is_shown_verbatim",
        "test_tokenizer.test_base_model_has_no_chat",
    ],
    "D26 what goes to stdout": ["test_shell.test_pipes_and_redirections", "test_cli.test_reader_that_goes_away"],
    "E5 templates as programs": [
        "test_hostile_models.test_a_template_is_run_by_nobody",
        "test_chat_template.test_hostile_and_broken_templates",
        "test_chat_template.test_time_limit",
        "test_chat_template.test_100_megabytes_are_stopped",
    ],
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_its_tests(name: str) -> None:
    for test in CLASSES[name]:
        module, function = test.split(".")
        tree = ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8"))
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test
