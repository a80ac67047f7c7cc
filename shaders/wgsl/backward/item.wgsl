{# The first statements of every workgroup: its tile, batch entry, heads and runs. It returns if
   there is nothing to do. Under a causal mask the last tiles of rows and the first tiles of keys
   are the longest, and come first. #}
    let group = group_id.x + group_id.y * params.grid_width;
    if (group >= params.items) { return; }
    let item = params.first_item + group;
{% if by_rows %}
    let tile = params.tile_first + params.tile_count - 1u - item % params.tile_count;
{% else %}
    let tile = params.tile_first + item % params.tile_count;
{% endif %}
    let batch_head = item / params.tile_count;
    let batch = params.batch_first + batch_head / params.heads;
    let own_head = params.head_first + batch_head % params.heads;
    let class_index = min(batch, params.last_class);
    let starts = params.starts_at + class_index * params.starts_class + 2u * (tile / {{tiles_of_list}}u);
    let full_runs = lists[starts];
    let tested_runs = lists[starts + 1u];
    let runs_end = lists[starts + 2u];
    if (full_runs == runs_end) { return; }
    let spans = params.spans_at + 2u * class_index * params.rows;
{% if of_one_query_head %}
    let head = own_head;
    let kv_head = lists[params.heads_at + own_head];
{% endif %}
