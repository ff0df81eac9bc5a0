package chart

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
)

// Each example in docs/examples must decode strictly, and use one request with a count for several
// equal devices. Requests that differ only in their names cost the scheduler exponential time.
func TestExamplesAreValid(t *testing.T) {
	files, err := filepath.Glob("../../docs/examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, object := range decode(t, string(content)) {
				template, ok := object.(*resourceapi.ResourceClaimTemplate)
				if !ok {
					continue
				}
				requests := template.Spec.Spec.Devices.Requests
				for i, r := range requests {
					if slices.ContainsFunc(requests[:i], func(o resourceapi.DeviceRequest) bool {
						o.Name = r.Name
						return cmp.Equal(o, r)
					}) {
						t.Errorf("request %s of %s differs from another only in its name", r.Name, template.Name)
					}
				}
			}
		})
	}
}
