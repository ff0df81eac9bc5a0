package watch

import (
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// The test expects that no output of a watcher makes its parent panic or wait forever.
func FuzzChildReport(f *testing.F) {
	for _, said := range []string{``, `{}`, `{`, `null`, `{}{}{}`, `{"event":{"kind":"xid","xid":-1}}`, "\x00", `[1`} {
		f.Add(said)
	}
	f.Fuzz(func(_ *testing.T, said string) {
		c := &watchChild{signals: make(chan device.Signal, 1), stop: make(chan struct{})}
		close(c.stop)
		_ = c.readSignals(strings.NewReader(said))
	})
}
