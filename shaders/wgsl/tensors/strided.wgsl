// A copy, or an addition, of [batch, rows, heads, row_units] with strides on both sides: repack and
// accumulate. One thread for each unit of 1 or 4 words.
{% include "parts/interface.wgsl" %}
{% include "parts/thread.wgsl" %}
    if (index >= params.units) { return; }
    let unit = index % params.row_units;
    let row_head = index / params.row_units;
    let head = row_head % params.heads;
    let row = (row_head / params.heads) % params.rows;
    let batch = row_head / params.heads / params.rows;
    let from_at = params.from_offset + batch * params.from_batch + row * params.from_row + head * params.from_head;
    let into_at = params.into_offset + batch * params.into_batch + row * params.into_row + head * params.into_head;
{% if adds %}
    destination[into_at + unit] = destination[into_at + unit] + source[from_at + unit];
{% else %}
    destination[into_at + unit] = source[from_at + unit];
{% endif %}
}
