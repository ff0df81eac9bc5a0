package schedules

import (
	"flag"
	"os"
	"testing"
	"testing/synctest"
)

var policyRuns = flag.Int("policies", 500, "number of sequences of policies, with consecutive seeds")

func TestPolicyChangesKeepAllocations(t *testing.T) {
	for i := range *policyRuns {
		seed := *firstSeed + uint64(i) //nolint:gosec // not negative
		dir := base(t)
		synctest.Test(t, func(t *testing.T) {
			violations, trace, err := runPolicies(dir, seed)
			if err != nil {
				t.Fatal(err)
			}
			if len(violations) > 0 {
				t.Errorf("sequence %d: run it again with -seed %d -policies 1\n%s\nwhat happened:\n%s", seed, seed, indentLines(violations), trace)
			}
		})
		_ = os.RemoveAll(dir)
	}
}
