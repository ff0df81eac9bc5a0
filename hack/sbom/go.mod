// The list of what is linked into the programs, apart from the product's own module.
module github.com/gpu-dra-driver/gpu-dra-driver/hack/sbom

go 1.26.0

require (
	github.com/CycloneDX/cyclonedx-go v0.9.2
	github.com/google/licensecheck v0.3.1
	golang.org/x/mod v0.42.0
)
