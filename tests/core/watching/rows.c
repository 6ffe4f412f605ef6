/* For test_rows.py, which compiles it together with the core. Each line of its input has lists of ranks between bars,
 * one of each host; it prints the list of all of them. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "watching/report.h"

int main(void)
{
    static char line[1 << 16];
    while (fgets(line, sizeof line, stdin)) {
        char text[HVDL_POSTED_BYTES] = "", *rest = line;
        hvdl_writer all = {text, sizeof text, 0};
        line[strcspn(line, "\n")] = '\0';
        for (char *part; (part = strsep(&rest, "|"));)
            hvdl_put_in_order(&all, part);
        puts(text);
        if (strlen(text) != all.used)
            return 1;
    }
    return 0;
}
