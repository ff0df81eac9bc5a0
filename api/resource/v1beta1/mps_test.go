package v1beta1

import (
	"strings"
	"testing"
	"time"
)

// Amounts of memory with a huge exponent must be refused at once. A Quantity with such an exponent
// takes hours to compare, and some take hours to parse.
func TestHugeMemoryAmountsAreRefusedQuickly(t *testing.T) {
	for _, amount := range []string{"1e2000000000", "1e-2000000000", "1E999", strings.Repeat("9", 5000), "0x10", "", "null", "4Gi4"} {
		for _, field := range []string{`"defaultPinnedDeviceMemoryLimit":"` + amount + `"`,
			`"defaultPerDevicePinnedMemoryLimit":{"0":"` + amount + `"}`} {
			done := make(chan error, 1)
			go func() {
				c, err := Decode([]byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS",` +
					`"mpsConfig":{` + field + `}}}`))
				if err == nil {
					c.Default()
					err = c.Validate()
				}
				done <- err
			}()
			select {
			case err := <-done:
				if err == nil || len(err.Error()) > 1000 {
					t.Errorf("%.40s: %v", field, err)
				}
			case <-time.After(10 * time.Second):
				t.Fatalf("%.40s: no answer", field)
			}
		}
	}
	for _, amount := range []string{`"4Gi"`, `"1.5Gi"`, `"80G"`, `1073741824`, `"2e9"`} {
		c, err := Decode([]byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS",` +
			`"mpsConfig":{"defaultPinnedDeviceMemoryLimit":` + amount + `}}}`))
		if err != nil {
			t.Errorf("%s: %v", amount, err)
			continue
		}
		if err := c.Validate(); err != nil {
			t.Errorf("%s: %v", amount, err)
		}
	}
}
