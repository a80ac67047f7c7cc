{# Whether slot `s` sees the thread's key, which is at `position`; with a bias, also the term of its
   logit. #}
{% if bias %}
            let term{{s}} = bias_term(bias_row{{s}}, position);
            let vis{{s}} = inside && lo{{s}} <= position && position < hi{{s}} && shows(term{{s}});
{% else %}
            let vis{{s}} = inside && lo{{s}} <= position && position < hi{{s}};
{% endif %}
