{# All runs, of all query heads that the workgroup has: one loop, because sums in registers are copied at each loop around
   them. It begins with where the moving tensors of the query head begin, and the moving rows first..end of the run. #}
{% if of_one_query_head %}
    for (var run = full_runs; run < runs_end; run++) {
{% else %}
    let runs = runs_end - full_runs;
    let first_head = lists[params.heads_at + own_head];
    let steps = (lists[params.heads_at + own_head + 1u] - first_head) * runs;
    for (var step = 0u; step < steps; step++) {
        let head = first_head + step / runs;
        let run = full_runs + step % runs;
{% endif %}
{% if by_rows %}
        let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
        let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
{% else %}
        let q_base = params.q_offset + batch * params.q_batch + head * params.q_head;
        let d_o_base = params.d_o_offset + batch * params.d_o_batch + head * params.d_o_head;
        let stats_base = params.stats_offset + batch * params.stats_batch + head * params.stats_head;
{% endif %}
        let first = max(lists[params.runs_at + 2u * run], params.moving_begin);
        let end = min(lists[params.runs_at + 2u * run + 1u], params.moving_end);
