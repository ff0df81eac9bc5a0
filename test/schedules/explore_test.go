package schedules

import (
	"context"
	"flag"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
)

var depth = flag.Int("depth", 1, "number of operations after which the explorer stops")

// smallWorlds has one entry for each exploration: the kinds of its two claims.
var smallWorlds = [][]string{
	{"partition", "other partition"},
	{"partition", "whole"},
	{"fraction", "fraction"},
	{"share", "share"},
	{"fraction of a partition", "fraction of a partition"},
	{"share of a partition", "whole, time slices"},
	{"passthrough", "whole"},
}

func named(t *testing.T, name string) template {
	t.Helper()
	for _, k := range templates {
		if k.name == name {
			return k
		}
	}
	t.Fatalf("no claims of kind %q", name)
	return template{}
}

func TestExploreSmallWorlds(t *testing.T) {
	for _, names := range smallWorlds {
		t.Run(strings.Join(names, " and "), func(t *testing.T) {
			locks := filepath.Join(base(t), "claims.lock")
			synctest.Test(t, func(t *testing.T) {
				e := &explorer{lockFile: locks}
				for _, name := range names {
					e.templates = append(e.templates, named(t, name))
				}
				all := e.explore(context.Background(), *depth)
				alone := e.transitions
				for _, m := range e.calmStates(all) {
					e.pairs(m)
				}
				for _, b := range e.violations {
					t.Errorf("the explorer found: %s", b)
				}
				t.Logf("%d states, %d transitions of one instance, %d of two", e.states, alone, e.transitions-alone)
			})
		})
	}
}
