{# The same for a unit that is a texel: four words. #}
{% if storage == "f32" %}
fn texel_0(texel: vec4<u32>) -> vec4<f32> { return bitcast<vec4<f32>>(texel); }
{% else %}
fn texel_0(texel: vec4<u32>) -> vec4<f32> { return chunk_0(texel); }
fn texel_1(texel: vec4<u32>) -> vec4<f32> { return chunk_1(texel); }
{% endif %}

