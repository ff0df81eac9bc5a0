// Package exports has the names of all functions that libnvidia-ml.so.1 exports. The build of the
// simulated library makes stubs from the list, and the control tool refuses faults for other names.
package exports

import (
	_ "embed"
	"slices"
	"strings"
)

//go:embed exports.txt
var list string

// Names returns the names of all functions that the library exports, sorted.
func Names() []string {
	var names []string
	for line := range strings.Lines(list) {
		if name := strings.TrimSpace(line); name != "" && !strings.HasPrefix(name, "#") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Has reports whether libnvidia-ml.so.1 exports a function of this name.
func Has(name string) bool {
	_, found := slices.BinarySearch(Names(), name)
	return found
}
