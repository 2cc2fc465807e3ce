"""Which test holds which class of failure that others have reported: sources (A), quantizing (B), pushing (C),
running (D), templates (E5)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLASSES = {
    "A1 a shard that is missing": ["test_source.test_missing_shard_is_named"],
    "A2 an index of another build": [
        "test_source.test_index_of_another_build_is_ignored_loudly_where_the_files_are_whole",
        "test_source.test_index_of_another_build_with_overlap_is_refused",
    ],
    "A3 tied and untied heads": [
        "test_source.test_tied_head_is_the_embedding",
        "test_source.test_untied_head_that_is_absent_is_refused",
        "test_decoder.test_a_tied_head_absent_or_present_or_alone",
    ],
    "A4 sizes that no block divides": [
        "test_reported_failures.test_sizes_that_no_block_divides",
        "test_pipeline.test_weights_come_back",
    ],
    "A5 the tail of a row": ["test_rounding.test_tail_of_a_row_is_as_good_as_its_body"],
    "A6 buffers and unknown tensors": ["test_reported_failures.test_buffers_and_unknown_tensors_change_nothing"],
    "A7 biases": ["test_reported_failures.test_large_biases_arrive", "test_source.test_missing_tensors_are_named"],
    "A8 head_dim": [
        "test_architecture.test_head_dim_is_its_own_setting",
        "test_source.test_misshapen_tensor_gives_both_shapes",
    ],
    "A9 sources that are quantized": [
        "test_source.test_quantized_config_is_refused",
        "test_source.test_quantized_tensors_without_a_config_are_refused",
    ],
    "A10 nested configs": [
        "test_architecture.test_two_spellings_of_one_model",
        "test_source.test_sizes_that_a_nested_config_leaves_out_are_never_made_up",
    ],
    "A11 merges": [
        "test_tokenizer.test_merges_as_pairs_and_as_text",
        "test_tokenizer.test_merges_that_hold_spaces",
        "test_quantize_cli.test_broken_sources",
    ],
    "A12 pre-tokenizers": ["test_tokenizer.test_pre_tokenizers"],
    "A13 tokens without a row": [
        "test_source.test_added_token_without_a_row_is_named",
        "test_source.test_tokenizer_ids_within_the_embedding",
    ],
    "A14 damaged shards": [
        "test_source.test_truncated_shard_is_found_before_any_work",
        "test_source.test_nan_and_infinity_are_named_by_tensor_and_row",
    ],
    "A15 links and names": [
        "test_source_hostile.test_hub_cache_links_are_followed",
        "test_source.test_paths_with_spaces_and_other_alphabets",
    ],
    "A16 pickles": ["test_source_hostile.test_pickles_are_refused_and_never_opened"],
    "B1 Hessians of poor text": [
        "test_pipeline.test_three_tokens_are_enough",
        "test_pipeline.test_tied_models_hold_one_table_and_poor_text_will_do",
    ],
    "B2 tiny weights": ["test_reported_failures.test_tiny_weights_stay_finite"],
    "B3 subnormals": ["test_source.test_bf16_and_fp16_subnormals_are_exact_even_where_arithmetic_flushes_them"],
    "B4 large activations": [
        "test_reported_failures.test_overflow_in_fp32_names_the_layer",
        "test_calibrate.test_large_activations",
    ],
    "B5 a full disk": ["test_resume.test_a_disk_that_is_really_full", "test_format.test_space_is_checked_up_front"],
    "B6 killed runs": ["test_resume.test_killed_at_random_moments", "test_pipeline.test_killed_runs_go_on"],
    "B7 what was typed": [
        "test_quantize_cli.test_json_and_resume_after_an_interrupt",
        "test_pipeline.test_other_options_do_not_resume",
    ],
    "B8 too little text": ["test_calibrate.test_too_little_text_is_counted"],
    "B9 the same bytes": ["test_pipeline.test_threads_do_not_change_a_byte"],
    "B10 memory": [
        "test_pipeline.test_one_layer_is_in_memory_at_a_time",
        "test_pipeline.test_memory_limits_of_control_groups_are_seen",
        "test_reported_failures.test_too_little_memory_is_told",
    ],
    "B11 large vocabularies": ["test_pipeline.test_heads_that_are_made_in_chunks_are_the_same"],
    "B12 templates and tokenizer files": [
        "test_pipeline.test_chat_templates_and_tokenizer_files_come_along",
        "test_chat_template.test_same_choice_as_transformers",
    ],
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
