package e2e

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/version"
)

// needSMI skips the test if the real nvidia-smi is not available.
func (w *world) needSMI(t *testing.T) {
	t.Helper()
	if w.sim.SMI == "" {
		t.Skip("SKIPPED: the real nvidia-smi is not available")
	}
}

// partitionSuites use partitions or shares. The API server of Kubernetes 1.34 accepts no slices
// that describe these (publish.Features), whatever its feature gates.
var partitionSuites = []string{
	"TestAwkwardNode", "TestBadInput", "TestClaims", "TestHealth", "TestHealthClaims", "TestHealthCost", "TestMatrix", "TestMIG",
	"TestMIGNodes", "TestMigration", "TestNeighbours", "TestPassthrough", "TestPassthroughFaults", "TestSharing", "TestSoak",
	"TestSurvival", "TestTrust",
}

// long ends a part of a suite that `make test` leaves to `make test-long`.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("make test-long runs this part")
	}
}

// needsRelease skips a suite that makes no sense on this version of Kubernetes.
func needsRelease(t *testing.T, kubernetes string) {
	t.Helper()
	suite, _, _ := strings.Cut(t.Name(), "/")
	if strings.HasPrefix(strings.TrimPrefix(kubernetes, "v"), "1.34") && slices.Contains(partitionSuites, suite) {
		t.Skipf("SKIPPED: Kubernetes %s has no partitions and shares, which this suite uses", kubernetes)
	}
}

// isBefore reports whether the cluster's Kubernetes is older than this version, like 1.37.
func (w *world) isBefore(t *testing.T, than string) bool {
	t.Helper()
	info, err := w.Client.Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	return version.MustParseGeneric(info.GitVersion).LessThan(version.MustParseGeneric(than))
}
