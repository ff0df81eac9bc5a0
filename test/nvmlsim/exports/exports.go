// Package exports holds the list of every function that libnvidia-ml.so.1 exports: the library's build makes stubs from it, and the
// control tool refuses to order faults for a name that no caller could call.
package exports

import (
	_ "embed"
	"slices"
	"strings"
)

//go:embed exports.txt
var list string

// Names are all names, sorted.
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

// Has tells whether NVML exports the name.
func Has(name string) bool {
	_, found := slices.BinarySearch(Names(), name)
	return found
}
