package leader

import (
	"os"
	"testing"
	"time"
)

// Whatever the request file contains, the leader must read it either as a start time of another
// plugin instance or as no request, and must not panic.
func FuzzHandoverRequest(f *testing.F) {
	for _, text := range []string{"1700000000000000000", "", "-1", "1e9", "99999999999999999999", " 1\n"} {
		f.Add([]byte(text))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		l := New(dir, time.Unix(1, 0))
		if err := os.WriteFile(l.requestPath, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if at := l.requestTime(); !at.IsZero() && !time.Unix(0, at.UnixNano()).Equal(at) {
			t.Errorf("%q is %v", text, at)
		}
	})
}
