{# The first statements of every workgroup: its tile of query rows, batch entry, heads and runs. It
   returns if there is nothing to do. #}
    let group = group_id.x + group_id.y * params.grid_width;
    if (group >= params.items) { return; }
    let item = params.first_item + group;
    let tile = params.tile_first + params.tile_count - 1u - item % params.tile_count;
    let batch_head = item / params.tile_count;
    let batch = params.batch_first + batch_head / params.heads;
    let head = batch_head % params.heads;
    let kv_head = positions[head];
    let class_index = min(batch, params.last_class);
    let starts = class_index * params.starts_class + 2u * tile;
    let full_runs = work[starts];
    let partial_runs = work[starts + 1u];
    let runs_end = work[starts + 2u];
    if (full_runs == runs_end) { return; }
    let spans = params.spans_at + 2u * class_index * params.rows;
