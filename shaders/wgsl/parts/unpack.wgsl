{# A unit is 16 bytes of a tensor. chunk_0 and, of 16-bit types, chunk_1: its 4 elements as f32,
   without any extension. #}
{% if storage == "f32" %}
fn chunk_0(unit: vec4<f32>) -> vec4<f32> { return unit; }
{% elif storage == "f16" %}
fn chunk_0(unit: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.x), unpack2x16float(unit.y));
}
fn chunk_1(unit: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.z), unpack2x16float(unit.w));
}
{% else %}
fn pair(word: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}
fn chunk_0(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.x), pair(unit.y)); }
fn chunk_1(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.z), pair(unit.w)); }
{% endif %}

