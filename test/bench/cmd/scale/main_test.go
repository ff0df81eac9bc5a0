package main

import (
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
)

func samples(all ...time.Duration) costs {
	return costs{elapsed: report.Samples{All: all}, processor: report.Samples{All: all}}
}

func TestRateLimitAppliesOnlyToNewSchedulers(t *testing.T) {
	for _, test := range []struct {
		version string
		// cost is the time per claim in one round, in all layouts except the one named "whole". In that
		// layout a claim takes 8 ms.
		cost time.Duration
		// limited is set if the report must contain goals for this version. met is set if these goals
		// must be met.
		limited, met bool
	}{
		{"v1.37.0", 10 * time.Millisecond, true, true},
		{"v1.37.0", 11 * time.Millisecond, true, false},
		{"v1.40.1", 11 * time.Millisecond, true, false},
		{"v1.36.3", 400 * time.Millisecond, false, false},
	} {
		s := &scale{options: options{kubernetes: []string{test.version}, layouts: layouts, nodes: []int{500}}, costs: map[key]*costs{}}
		for _, l := range layouts {
			cost := samples(8*time.Millisecond, time.Second, time.Millisecond) // one round was disturbed
			if l.name != whole {
				cost = samples(test.cost, time.Second, time.Millisecond)
			}
			for _, c := range l.claims {
				s.costs[key{test.version, l.name, c.name, 500}] = &cost
			}
		}
		r := s.conclude()
		if test.limited != (len(r.Goals) == 3) || !test.limited && len(r.Goals) > 0 {
			t.Errorf("%s: goals are %v", test.version, r.Goals)
		}
		for _, g := range r.Goals {
			if g.Met() != test.met {
				t.Errorf("%s, %s for a claim: %+v", test.version, test.cost, g)
			}
		}
		compared := 0
		for _, row := range r.Rows {
			if row.Ratio50 > 0 {
				compared++
			}
		}
		if compared != 8 { // time and processor of four kinds of claims for whole GPUs
			t.Errorf("%s: %d of %d rows are compared with whole GPUs only", test.version, compared, len(r.Rows))
		}
	}
}

func TestMixedClusterHasPartitionNodes(t *testing.T) {
	for _, l := range layouts {
		pool := 0
		for i := range l.total(500) {
			if l.inPool(i) {
				pool++
			}
		}
		want := 0
		if l.name == "mixed" {
			want = 50
		}
		if pool != want || l.total(500)-pool != 500 {
			t.Errorf("%s: %d nodes of the pool among %d", l.name, pool, l.total(500))
		}
	}
}
