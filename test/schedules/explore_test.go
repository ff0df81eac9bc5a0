package schedules

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
)

var depth = flag.Int("depth", 1, "how many operations deep the small worlds are explored")

// smallWorlds are two claims each.
var smallWorlds = [][]string{
	{"partition", "other partition"},
	{"partition", "whole"},
	{"fraction", "fraction"},
	{"share", "share"},
	{"fraction of a partition", "fraction of a partition"},
	{"share of a partition", "whole, time slices"},
}

func named(t *testing.T, name string) template {
	t.Helper()
	for _, k := range templates {
		if k.name == name {
			return k
		}
	}
	t.Fatalf("there are no claims of kind %q", name)
	return template{}
}

func TestExploreEveryWayThatASmallWorldCanGo(t *testing.T) {
	for _, names := range smallWorlds {
		t.Run(strings.Join(names, " and "), func(t *testing.T) {
			locks := filepath.Join(base(t), "locks")
			if err := os.MkdirAll(locks, 0o700); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				e := &explorer{lockDir: locks}
				for _, name := range names {
					e.of = append(e.of, named(t, name))
				}
				all := e.explore(context.Background(), *depth)
				alone := e.transitions
				for _, m := range e.quietest(all) {
					e.pairs(m)
				}
				for _, b := range e.broken {
					t.Errorf("the explorer found: %s", b)
				}
				t.Logf("%d states by %d ways of one instance, and %d ways of two", e.states, alone, e.transitions-alone)
			})
		})
	}
}
