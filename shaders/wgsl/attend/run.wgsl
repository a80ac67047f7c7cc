{# The keys first..end of run number `run` that belong to this dispatch. #}
        let first = max(work[params.runs_at + 2u * run], params.key_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], params.key_end);
