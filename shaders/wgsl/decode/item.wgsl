{# The first statements of every workgroup: its split of the keys, batch entry, heads and runs, and
   the span of each slot, unless there are many. #}
    let group = group_id.x + group_id.y * params.grid_width;
    if (group >= params.items) { return; }
    let item = params.first_item + group;
    let batch_group = item / params.splits;
    let batch = params.batch_first + batch_group / params.groups;
    let first_head = (batch_group % params.groups) * params.group_heads;
    let kv_head = positions[first_head];
    let split_begin = params.key_begin + (item % params.splits) * params.split_keys;
    let split_end = min(split_begin + params.split_keys, params.key_end);
    let class_index = min(batch, params.last_class);
    let starts = class_index * params.starts_class;
    let spans = params.spans_at + 2u * class_index * params.rows;
{% for s in range(slots) %}
{% if not many %}
    let row{{s}} = {{s}}u / params.group_heads;
    let lo{{s}} = positions[spans + 2u * row{{s}}];
    let hi{{s}} = positions[spans + 2u * row{{s}} + 1u];
{% endif %}
{% if bias %}
    let bias_row{{s}} = params.bias_offset + batch * params.bias_batch + ({{s}}u / params.group_heads) * params.bias_row
        + (first_head + {{s}}u % params.group_heads) * params.bias_head;
{% endif %}
{% endfor %}
