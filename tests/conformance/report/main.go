// Command report turns Ginkgo's JSON reports, of one run or of a run in parts, into the page docs/conformance.md. The page has no date, so that two
// equal runs differ in their times alone.
package main

import (
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"regexp"
	"sort"
	"strings"
	"time"

	"github.com/onsi/ginkgo/v2/types"
)

type tally struct {
	passed, failed, skipped int
	took                    time.Duration
}

var sigName = regexp.MustCompile(`\[(sig-[a-z-]+)\]`)

//go:embed known.txt
var known string

// why gives the known reason of a failure.
func why(test string) string {
	for _, line := range strings.Split(known, "\n") {
		expression, reason, found := strings.Cut(line, "\t")
		if found && !strings.HasPrefix(line, "#") && regexp.MustCompile(expression).MatchString(test) {
			return ": " + reason
		}
	}
	return ""
}

func main() {
	log.SetFlags(0)
	suite := flag.String("suite", "", "version of the suite")
	focus := flag.String("focus", "", "what was asked for")
	skip := flag.String("skip", "", "what was left out")
	reasons := flag.Bool("reasons", false, "print each failed test with its message instead of the page")
	flag.Parse()
	var reports []types.Report
	for _, file := range flag.Args() {
		bytes, err := os.ReadFile(file)
		if err != nil {
			log.Fatal(err)
		}
		var more []types.Report
		if err := json.Unmarshal(bytes, &more); err != nil {
			log.Fatal(err)
		}
		reports = append(reports, more...)
	}
	sigs := map[string]*tally{}
	var total tally
	var failed, skipped []types.SpecReport
	var wall time.Duration
	for _, report := range reports {
		wall += report.RunTime
		for _, spec := range report.SpecReports {
			if spec.LeafNodeType != types.NodeTypeIt || spec.State == types.SpecStatePending {
				if spec.Failed() {
					failed = append(failed, spec)
				}
				continue
			}
			if spec.State == types.SpecStateSkipped && spec.Failure.Message == "" {
				continue // The focus leaves it out.
			}
			sig := "other"
			if found := sigName.FindStringSubmatch(spec.FullText()); found != nil {
				sig = found[1]
			}
			if sigs[sig] == nil {
				sigs[sig] = &tally{}
			}
			for _, count := range []*tally{sigs[sig], &total} {
				count.took += spec.RunTime
				switch {
				case spec.State == types.SpecStatePassed:
					count.passed++
				case spec.State == types.SpecStateSkipped:
					count.skipped++
				default:
					count.failed++
				}
			}
			switch {
			case spec.State == types.SpecStateSkipped:
				skipped = append(skipped, spec)
			case spec.State != types.SpecStatePassed:
				failed = append(failed, spec)
			}
		}
	}
	byName(failed)
	byName(skipped)
	if *reasons {
		for _, spec := range failed {
			fmt.Printf("### %s (%s)\n%s\n%s\n\n", spec.FullText(), seconds(spec.RunTime), strings.TrimSpace(spec.Failure.Message), spec.Failure.Location)
		}
		return
	}

	fmt.Printf("# Conformance\n\nThe official end-to-end suite of Kubernetes %s against skiff, by\n`make conformance [NODES=n] [FOCUS=regex] [SKIP=regex] [PARALLEL=n]`. Tests of this run: `%s`", *suite, *focus)
	if *skip != "" {
		fmt.Printf(", without `%s`", *skip)
	}
	fmt.Printf(".\n\nThe suite and agnhost are built from their Go module; the other images are stand-ins made of Debian packages\n"+
		"under the same names (`tests/conformance/images/recipes.go`). Wall time %s; the times below are sums over tests,\nwhich run side by side.\n\n", seconds(wall))
	fmt.Println("| sig | passed | failed | skipped | time |\n|---|---:|---:|---:|---:|")
	names := make([]string, 0, len(sigs))
	for name := range sigs {
		names = append(names, name)
	}
	sort.Strings(names)
	row := func(name string, count *tally) {
		fmt.Printf("| %s | %d | %d | %d | %s |\n", name, count.passed, count.failed, count.skipped, seconds(count.took))
	}
	for _, name := range names {
		row(name, sigs[name])
	}
	row("**all**", &total)
	list("Failed", failed, why)
	list("Skipped by the suite", skipped, func(string) string { return "" })
}

func byName(specs []types.SpecReport) {
	sort.Slice(specs, func(a, b int) bool { return specs[a].FullText() < specs[b].FullText() })
}

func list(title string, specs []types.SpecReport, why func(string) string) {
	if len(specs) == 0 {
		return
	}
	fmt.Printf("\n## %s\n\n", title)
	for _, spec := range specs {
		text := spec.FullText()
		if text == "" {
			text = spec.LeafNodeType.String()
		}
		fmt.Printf("- %s%s\n", text, why(text))
	}
}

func seconds(took time.Duration) string {
	return took.Round(time.Second).String()
}
