package driver

import (
	"slices"
	"strings"
	"sync"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// gate is the inventory as the rest of the driver sees it: not ready while something besides the hardware forbids to offer it.
type gate struct {
	inv inventorySource

	mu      sync.Mutex
	reasons map[string]string
}

// Close says why nothing may be offered, as seen from source; the empty reason takes that back.
func (g *gate) Close(source, reason string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if reason == "" {
		delete(g.reasons, source)
		return
	}
	if g.reasons == nil {
		g.reasons = map[string]string{}
	}
	g.reasons[source] = reason
}

// Closed says whether anything besides the hardware forbids to offer it.
func (g *gate) Closed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.reasons) > 0
}

// Snapshot is the inventory's, with all that closes the gate as further reasons.
func (g *gate) Snapshot() inventory.Snapshot {
	s := g.inv.Snapshot()
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.reasons) == 0 {
		return s
	}
	var reasons []string
	if s.Reason != "" {
		reasons = append(reasons, s.Reason)
	}
	sources := make([]string, 0, len(g.reasons))
	for source := range g.reasons {
		sources = append(sources, source)
	}
	slices.Sort(sources)
	for _, source := range sources {
		reasons = append(reasons, g.reasons[source])
	}
	s.Ready = false
	s.Reason = strings.Join(reasons, "; ")
	return s
}
