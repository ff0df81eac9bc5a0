package prepare

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

func TestMebibytesNeverOverflow(t *testing.T) {
	for text, want := range map[string]uint64{"1e30": 1 << 30, "8Ei": 1 << 30, "-1e30": 0, "-1": 0, "1Mi": 1, "1500Ki": 1} {
		if got := mebibytes(resource.MustParse(text)); got != want {
			t.Errorf("%s are %d MiB, not %d", text, got, want)
		}
	}
}
