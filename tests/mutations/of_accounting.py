"""Faults of the accounting and of the samplers, whose amplification it counts on."""

from tests.mutations.fault import Fault

_PLAN = "dp_sparse/accounting/plan.py"
_COST = "dp_sparse/accounting/run_cost.py"
_ACCOUNTANT = "dp_sparse/accounting/accountant.py"
_LOSS = "dp_sparse/accounting/privacy_loss.py"
_ADAFEST = "dp_sparse/accounting/mechanisms.py"
_MECHANISMS = "dp_sparse/accounting/mechanisms.py"
_GUMBEL = "dp_sparse/accounting/privacy_loss.py"
_POISSON = "dp_sparse/sampling/poisson.py"
_SKIPS = "dp_sparse/sampling/skips.py"
_OFFLINE = "dp_sparse/sampling/offline"
_OF_OFFLINE = "tests/sampling/test_offline.py"
_OF_CHECKPOINT = "tests/training/test_checkpoint.py"
_STREAM = "dp_sparse/sampling/stream.py"

_OF_PLAN = "tests/accounting/test_plan.py"
_OF_LOSS = "tests/accounting/test_privacy_loss.py"
_OF_GUMBEL = "tests/accounting/test_gumbel.py"
_OF_STOPPING = "tests/accounting/test_stopping.py"
_OF_POISSON = "tests/sampling/test_poisson.py"
_OF_STREAM = "tests/sampling/test_stream.py"

FAULTS = (
    Fault(
        "sigma_of_all_in_place_of_that_of_the_gradient",
        _ADAFEST,
        "noise_multiplier * math.sqrt(1 + ratio**-2)",
        "noise_multiplier",
        (
            "tests/optimizers/test_adafest.py"
            "::test_the_two_releases_are_one_gaussian_of_the_plans_sigma",
        ),
    ),
    Fault(
        "the_two_parts_of_sigma_exchanged",
        _ADAFEST,
        "noise_multiplier * math.sqrt(1 + ratio**2), noise_multiplier * math.sqrt(1 + ratio**-2)",
        "noise_multiplier * math.sqrt(1 + ratio**-2), noise_multiplier * math.sqrt(1 + ratio**2)",
        ("tests/optimizers/test_adafest.py",),
    ),
    Fault(
        "count_of_unclipped_examples_for_free",
        "dp_sparse/clipping/styles.py",
        "of_step / math.sqrt(1 - self.noise_ratio**-2)",
        "of_step",
        (
            "tests/training/test_quantile_clipping.py"
            "::test_the_parts_add_up_to_the_plans_noise_multiplier",
        ),
    ),
    Fault(
        "two_sampled_events_in_place_of_one",
        _ACCOUNTANT,
        "            return self._maybe_compose_sampled(event, count, do_compose)\n",
        "            parts = [\n"
        "                dp_accounting.PoissonSampledDpEvent(event.sampling_probability, part)\n"
        "                for part in event.event.events\n"
        "            ]\n"
        "            errors = [self._maybe_compose(part, count, do_compose) for part in parts]\n"
        "            return next((error for error in errors if error is not None), None)\n",
        (f"{_OF_LOSS}::test_a_gaussian_in_parts_costs_what_it_costs_whole",),
    ),
    Fault(
        "sampling_of_several_releases_for_the_wrong_probability",
        _ACCOUNTANT,
        "privacy_loss.sampled(inner.distribution, event.sampling_probability, interval)",
        "privacy_loss.sampled(inner.distribution, event.sampling_probability**2, interval)",
        (f"{_OF_LOSS}::test_a_sampled_composition_is_exact",),
    ),
    Fault(
        "count_of_sampled_steps_left_out",
        _ACCOUNTANT,
        "        self.add(privacy_loss.rounded_up(loss), count)\n        return None\n\n\n",
        "        self.add(privacy_loss.rounded_up(loss))\n        return None\n\n\n",
        (f"{_OF_LOSS}",),
    ),
    Fault(
        "direction_of_a_removal_left_out",
        _LOSS,
        "    return of_curves(removed, added, interval)\n\n\ndef deltas",
        "    return of_curves(added, added, interval)\n\n\ndef deltas",
        (f"{_OF_LOSS}::test_a_sampled_composition_is_exact",),
    ),
    Fault(
        "direction_of_an_addition_left_out",
        _LOSS,
        "np.maximum(_delta(loss._pmf_remove, epsilons), _delta(loss._pmf_add, epsilons))",
        "_delta(loss._pmf_remove, epsilons)",
        (f"{_OF_LOSS}::test_deltas_are_those_of_the_worse_direction",),
    ),
    Fault(
        "epsilon_of_a_removal_alone",
        _LOSS,
        "return max(_least_epsilon(pmf, delta) for pmf in (loss._pmf_remove, loss._pmf_add))",
        "return _least_epsilon(loss._pmf_remove, delta)",
        (f"{_OF_LOSS}::test_epsilon_is_that_of_the_worse_direction",),
    ),
    Fault(
        "sampled_loss_of_a_smaller_probability",
        "dp_sparse/accounting/privacy_loss.py",
        "beyond + least) - math.log(probability)",
        "beyond + least) - 0.9 * math.log(probability)",
        ("tests/accounting/test_gaussian_loss.py",),
    ),
    Fault(
        "direction_of_an_addition_left_out_of_gumbel_noise",
        _GUMBEL,
        "    return np.clip(removed, 0, 1), np.clip(added, 0, 1)",
        "    return np.clip(removed, 0, 1), np.clip(removed, 0, 1)",
        (f"{_OF_GUMBEL}::test_histogram_delta_is_the_reference",),
    ),
    Fault(
        "gumbel_selection_at_the_price_of_one_row",
        _GUMBEL,
        "rho = selected / (8 * scale**2)",
        "rho = 1 / (8 * scale**2)",
        (
            f"{_OF_GUMBEL}::test_exact_selections_cost_no_more",
            f"{_OF_GUMBEL}::test_peeling_delta_is_the_best_order",
        ),
    ),
    Fault(
        "pure_loss_of_half_its_epsilon",
        _LOSS,
        "curve = below / (1 + math.exp(-epsilon))",
        "curve = below / (2 + 2 * math.exp(-epsilon))",
        (f"{_OF_LOSS}::test_a_sampled_composition_is_exact",),
    ),
    Fault(
        "exponential_selection_at_the_price_of_one_row",
        _MECHANISMS,
        "rows = dp_accounting.SelfComposedDpEvent(one, self.rows_per_step)",
        "rows = dp_accounting.SelfComposedDpEvent(one, 1)",
        (f"{_OF_LOSS}::test_the_price_of_a_selection",),
    ),
    Fault(
        "delta_of_overflows_left_out",
        _COST,
        "return self.sampling.overflow_delta(epsilon, self.steps) + tail",
        "return tail",
        (f"{_OF_PLAN}::test_a_smaller_capacity_spends_more",),
    ),
    Fault(
        "delta_of_the_reach_left_out",
        _COST,
        "return self.sampling.overflow_delta(epsilon, self.steps) + tail",
        "return self.sampling.overflow_delta(epsilon, self.steps)",
        (f"{_OF_PLAN}::test_the_reach_of_the_noise_is_inside_delta",),
    ),
    Fault(
        "delta_of_the_reach_of_one_step",
        _COST,
        "tail = self.sampling.participations(self.steps) * beyond_reach(self.noise_multiplier)",
        "tail = beyond_reach(self.noise_multiplier)",
        (f"{_OF_PLAN}::test_what_is_left_of_delta_pays_for_the_mechanism",),
    ),
    Fault(
        "participations_of_one_step",
        _POISSON,
        "return steps * self.sampling_probability",
        "return self.sampling_probability",
        (f"{_OF_PLAN}::test_what_is_left_of_delta_pays_for_the_mechanism",),
    ),
    Fault(
        "releases_not_composed",
        _COST,
        "events = [release.event for release in self.releases]",
        "events: list[dp_accounting.DpEvent] = []",
        (f"{_OF_PLAN}::test_releases_compose_jointly_with_training",),
    ),
    Fault(
        "budget_met_at_twice_its_epsilon",
        _PLAN,
        "smallest_noise_multiplier(self._epsilon_of_all_steps(), self.budget.epsilon)",
        "smallest_noise_multiplier(self._epsilon_of_all_steps(), 1.02 * self.budget.epsilon)",
        (f"{_OF_PLAN}::test_calibration_is_on_the_feasible_side_and_tight",),
    ),
    Fault(
        "failures_not_taken_from_delta",
        "dp_sparse/accounting/run_cost.py",
        "epsilon = epsilon_of(event, budget.delta - needed, interval)",
        "epsilon = epsilon_of(event, budget.delta, interval)",
        (
            f"{_OF_PLAN}::test_what_is_left_of_delta_pays_for_the_mechanism",
            f"{_OF_PLAN}::test_spent_equals_the_accountant_with_the_overflow_taken_off",
        ),
    ),
    Fault(
        "failures_left_out_beyond_the_budget",
        "dp_sparse/accounting/run_cost.py",
        "return accountant_of(event, interval).deltas(epsilons) + failures",
        "return accountant_of(event, interval).deltas(epsilons)",
        (
            "tests/accounting/test_failures.py"
            "::test_the_answer_is_on_the_safe_side_and_the_smallest",
        ),
    ),
    Fault(
        "delta_of_overflows_without_e_to_the_epsilon",
        _POISSON,
        "* (1 + math.exp(min(epsilon, 700.0)))",
        "* 1",
        (f"{_OF_POISSON}::test_overflow_delta",),
    ),
    Fault(
        "delta_of_overflows_of_one_step",
        _POISSON,
        "            steps\n            * (1 + math",
        "            1\n            * (1 + math",
        (f"{_OF_POISSON}::test_overflow_delta",),
    ),
    Fault(
        "event_of_a_smaller_sampling_probability",
        _POISSON,
        "dp_accounting.PoissonSampledDpEvent(self.sampling_probability, mechanism)",
        "dp_accounting.PoissonSampledDpEvent(0.9 * self.sampling_probability, mechanism)",
        (f"{_OF_POISSON}::test_event",),
    ),
    Fault(
        "sampling_of_a_stream_amplified",
        _STREAM,
        "return dp_accounting.SelfComposedDpEvent(mechanism, self.participations(steps))",
        "share = self.batch_size / self.num_examples\n"
        "        sampled = dp_accounting.PoissonSampledDpEvent(share, mechanism)\n"
        "        return dp_accounting.SelfComposedDpEvent(sampled, steps)",
        (f"{_OF_STREAM}::test_event",),
    ),
    Fault(
        "a_pass_that_has_begun_not_paid",
        _STREAM,
        "return math.ceil(steps / self.steps_per_pass)",
        "return steps // self.steps_per_pass",
        (f"{_OF_STREAM}::test_event", f"{_OF_PLAN}::test_streams_pay_by_the_pass"),
    ),
    Fault(
        "sampling_probability_too_large",
        _SKIPS,
        "np.cumsum(_gaps(rng, probability, chunk, cells))",
        "np.cumsum(_gaps(rng, 1.1 * probability, chunk, cells))",
        (f"{_OF_POISSON}::test_sizes_are_binomial",),
    ),
    Fault(
        "gaps_of_the_samples_one_too_long",
        _SKIPS,
        "found.append(last + np.cumsum(_gaps(rng, probability, chunk, cells)))",
        "found.append(last + np.cumsum(_gaps(rng, probability, chunk, cells)) + (last < 0))",
        (_OF_POISSON,),
    ),
    Fault(
        "batches_of_fixed_size",
        _SKIPS,
        "    return positions[positions < cells]",
        "    return np.sort(rng.choice(cells, int(expected), replace=False))",
        (f"{_OF_POISSON}::test_sizes_are_binomial",),
    ),
    Fault(
        "coins_of_all_chunks_alike",
        f"{_OFFLINE}/poisson.py",
        'chunk.to_bytes(8, "little")',
        "bytes(8)",
        (f"{_OF_OFFLINE}::TestDraw::test_depends_on_key_shard_and_chunk_alone",),
    ),
    Fault(
        "a_second_plan_on_one_draw",
        f"{_OFFLINE}/poisson.py",
        'if claimed["plan"] != plan:',
        "if not claimed:",
        (f"{_OF_OFFLINE}::TestOnePlan::test_another_plan_is_refused",),
    ),
    Fault(
        "a_second_run_on_one_draw",
        f"{_OFFLINE}/poisson.py",
        "if begins and",
        "if begins is None and",
        (
            f"{_OF_OFFLINE}::TestOnePlan::test_a_second_run_of_the_same_plan_goes_on_but_does_not_begin",
        ),
    ),
    Fault(
        "a_pickled_plan_begins_again",
        f"{_OFFLINE}/poisson.py",
        'return f"{run}-{_Process.name}"',
        "return run",
        ("tests/sampling/test_claim.py::test_a_pickled_plan_begins_once",),
    ),
    Fault(
        "a_draw_has_the_last_process_that_claims_it",
        "dp_sparse/core/files.py",
        "            os.link(unfinished, path)\n",
        "            unfinished.replace(path)\n",
        (
            "tests/sampling/test_claim.py::"
            "test_of_processes_that_begin_at_once_one_has_the_draw[links]",
        ),
    ),
    Fault(
        "padding_that_is_present",
        f"{_OFFLINE}/batches.py",
        "tf.cast(tf.range(manifest.capacity) < count, tf.float32)",
        "tf.ones([manifest.capacity])",
        (f"{_OF_OFFLINE}::test_batches_hold_what_was_drawn",),
    ),
    Fault(
        "blocks_of_another_step",
        f"{_OFFLINE}/batches.py",
        "require(found == step,",
        "require(found == found,",
        (f"{_OF_OFFLINE}::TestRefused::test_files_of_the_right_size_with_wrong_blocks",),
    ),
    Fault(
        "steps_of_a_data_service_as_they_come",
        f"{_OFFLINE}/batches.py",
        "yield waiting.pop(step)",
        "yield waiting.pop(max(waiting))",
        ("tests/sampling/test_data_service.py::test_any_order_and_any_loss",),
    ),
    Fault(
        "weights_seen_before_their_step_is_published",
        "dp_sparse/training/checkpoint_files.py",
        "        self.publish(plan, step)\n",
        "",
        (f"{_OF_CHECKPOINT}::TestPublished::test_whichever_checkpoint_is_loaded",),
    ),
    Fault(
        "published_steps_given_back",
        "dp_sparse/training/checkpoint.py",
        "            optimizer.count_spent(published)\n",
        "",
        (f"{_OF_CHECKPOINT}::TestPublished::test_whichever_checkpoint_is_loaded",),
    ),
    Fault(
        "an_overflow_truncated",
        _POISSON,
        "        if len(indices) > self.batch_capacity:\n",
        "        indices = indices[: self.batch_capacity]\n"
        "        if len(indices) > self.batch_capacity:\n",
        (f"{_OF_POISSON}::test_an_overflow_never_truncates",),
    ),
    Fault(
        "every_pass_draws_the_same_batches",
        _POISSON,
        'int.from_bytes(os.urandom(16), "little")',
        "len(os.urandom(16))",
        (f"{_OF_POISSON}::test_every_pass_is_fresh",),
    ),
    Fault(
        "a_run_that_stopped_early_claims_its_own_steps",
        _PLAN,
        "return self.spent(self._counted(steps) if self.stopping == FIXED else steps)",
        "return self.spent(steps)",
        (f"{_OF_STOPPING}::test_a_shorter_run_is_guaranteed_what_all_steps_cost",),
    ),
    Fault(
        "every_length_of_a_run_at_all_of_delta",
        "dp_sparse/accounting/budget.py",
        "epsilon(length, PrivacyBudget(budget.epsilon, share))\n        for length, share in",
        "epsilon(length, budget)\n        for length, _ in",
        (f"{_OF_STOPPING}::test_epsilon_at_any_time_holds_for_the_worst_rule",),
    ),
    Fault(
        "a_run_counts_as_one_that_is_shorter",
        "dp_sparse/accounting/budget.py",
        "        if length >= taken\n",
        "        if 2 * length >= taken\n",
        (f"{_OF_STOPPING}::test_epsilon_at_any_time_holds_for_the_worst_rule",),
    ),
    Fault(
        "calibration_for_any_time_at_all_of_delta",
        _PLAN,
        "steps, budget = self.sampling.steps, self.for_all_steps",
        "steps, budget = self.sampling.steps, self.budget",
        (f"{_OF_STOPPING}::test_a_plan_for_any_time_meets_its_budget",),
    ),
    Fault(
        "a_test_that_waits_at_the_power_of_few_steps",
        _PLAN,
        "counted = self._counted(steps) if self.stopping == ANY_TIME else steps",
        "counted = steps",
        (f"{_OF_STOPPING}::test_a_test_that_waits_has_the_power_of_all_steps",),
    ),
    Fault(
        "delta_of_one_part_for_a_person_in_all",
        "dp_sparse/accounting/disjoint_plans.py",
        "rounded_up(len(parts) * most.delta, 3)",
        "rounded_up(most.delta, 3)",
        ("tests/accounting/test_disjoint_plans.py::test_a_person_in_every_part_pays_every_delta",),
    ),
    Fault(
        "parts_that_stopped_early_at_the_cost_of_their_own_steps",
        "dp_sparse/accounting/disjoint_plans.py",
        "return self._largest([self.plans[name].guaranteed(taken) for name, taken in each])",
        "return self._largest([self.plans[name].spent(taken) for name, taken in each])",
        (
            "tests/accounting/test_disjoint_plans.py"
            "::test_parts_that_stopped_early_are_guaranteed_what_their_plans_cost",
        ),
    ),
    Fault(
        "seeded_batches_not_marked",
        "dp_sparse/sampling/batch.py",
        "return SEEDED if seed is not None else _NONCES.next()",
        "return _NONCES.next()",
        (f"{_OF_POISSON}::test_a_seed_repeats_and_is_marked",),
    ),
    Fault(
        "a_pass_that_repeats_examples",
        "dp_sparse/sampling/stream.py",
        "require(size <= expected, PrivacyError, longer)",
        "require(size >= 0, PrivacyError, longer)",
        (f"{_OF_STREAM}::test_a_pass_that_does_not_end_is_refused",),
    ),
    Fault(
        "a_short_pass_repeated",
        "dp_sparse/sampling/stream.py",
        "require(size >= expected, PrivacyError, message, index, size)",
        "require(size >= 0, PrivacyError, message, index, size)",
        (f"{_OF_STREAM}::test_a_short_pass_is_refused",),
    ),
    Fault(
        "a_resumed_dataset_repeats_examples",
        _STREAM,
        "if first == spent or not isinstance(source, tf.data.Dataset):",
        "if first >= spent:",
        (f"{_OF_STREAM}::test_a_dataset_goes_on_with_a_whole_pass",),
    ),
)
