package schedules

import (
	"flag"
	"os"
	"testing"
	"testing/synctest"
)

var sequences = flag.Int("policies", 2000, "how many sequences of policies are run, of one seed after the other")

func TestPoliciesChangeUnderHeldClaims(t *testing.T) {
	failed := 0
	for i := range *sequences {
		seed := *firstSeed + uint64(i) //nolint:gosec // counted from 0
		dir := base(t)
		synctest.Test(t, func(t *testing.T) {
			broken, story, err := runPolicies(dir, seed)
			if err != nil {
				t.Fatal(err)
			}
			if len(broken) > 0 {
				failed++
				t.Errorf("sequence %d: run it again with -seed %d -policies 1\n%s\nwhat happened:\n%s", seed, seed, join(broken), story)
			}
		})
		_ = os.RemoveAll(dir)
		if failed == 3 {
			t.Fatal("and so on")
		}
	}
}
